//! The searches for scales in llama.cpp's reference quantizers. Each search tries several scales for a group of
//! elements, and keeps the scale with the smallest weighted error.
//!
//! The order of the f32 operations is that of llama.cpp's `ggml-quants.c`, so that the results are equal bit by bit.

/// Below this absolute value, ggml treats all elements of a group as zero.
pub(super) const ZERO_BELOW: f32 = 1e-15;
/// The number of passes that change single codes after a search.
const PASSES: usize = 5;

/// Rounds to the nearest integer, and a number halfway between two integers to the even one. The addend leaves the
/// integer in the low bits of the mantissa. As in ggml, this holds for absolute values below 2^22.
pub(super) fn nearest(number: f32) -> i32 {
    let bits = (number + 12_582_912.0).to_bits();
    (bits & 0x007f_ffff) as i32 - 0x0040_0000
}

/// Returns the element with the largest absolute value, or `None` if all elements are zero by [`ZERO_BELOW`].
fn largest(numbers: &[f32]) -> Option<f32> {
    let (mut largest, mut absolute) = (0.0, 0.0);
    for number in numbers {
        if number.abs() > absolute {
            (largest, absolute) = (*number, number.abs());
        }
    }
    (absolute >= ZERO_BELOW).then_some(largest)
}

/// Finds the scale for codes from `-limit` to `limit - 1` with the smallest weighted squared error, ggml's
/// `make_qx_quants`. Writes each code plus `limit`.
pub(super) fn symmetric(numbers: &[f32], limit: i32, weights: &[f32], codes: &mut [u8]) -> f32 {
    let Some(largest) = largest(numbers) else {
        codes.fill(0);
        return 0.0;
    };
    let code = |inverse: f32, number: f32| nearest(inverse * number).clamp(-limit, limit - 1);
    let sums = |inverse: f32| {
        let (mut with_numbers, mut squares) = (0f32, 0f32);
        for (number, weight) in numbers.iter().zip(weights) {
            let code = code(inverse, *number) as f32;
            with_numbers += weight * number * code;
            squares += weight * code * code;
        }
        (with_numbers, squares)
    };
    let mut write = |inverse: f32| {
        for (written, number) in codes.iter_mut().zip(numbers) {
            *written = (code(inverse, *number) + limit) as u8;
        }
    };
    let inverse = -(limit as f32) / largest;
    let (with_numbers, squares) = sums(inverse);
    write(inverse);
    let mut scale = match squares {
        0.0 => 0.0,
        _ => with_numbers / squares,
    };
    let mut best = scale * with_numbers;
    for step in (-9..=9).filter(|step| *step != 0) {
        let inverse = -(limit as f32 + 0.1 * step as f32) / largest;
        let (with_numbers, squares) = sums(inverse);
        if squares > 0.0 && with_numbers * with_numbers > best * squares {
            write(inverse);
            scale = with_numbers / squares;
            best = scale * with_numbers;
        }
    }
    scale
}

/// Finds the scale for codes from `-limit` to `limit - 1`, ggml's `make_q3_quants`. The weight of an element is its
/// square. Passes over the codes then change each code that lowers the error. Writes each code plus `limit`.
pub(super) fn refined_symmetric(numbers: &[f32], limit: i32, codes: &mut [u8]) -> f32 {
    let Some(largest) = largest(numbers) else {
        codes.fill(0);
        return 0.0;
    };
    let inverse = -(limit as f32) / largest;
    let (mut with_numbers, mut squares) = (0f32, 0f32);
    for (written, number) in codes.iter_mut().zip(numbers) {
        let code = nearest(inverse * number).clamp(-limit, limit - 1);
        *written = (code + limit) as u8;
        let (weight, code) = (number * number, code as f32);
        with_numbers += weight * number * code;
        squares += weight * code * code;
    }
    for _ in 0..PASSES {
        let mut has_changed = false;
        for (written, number) in codes.iter_mut().zip(numbers) {
            let weight = number * number;
            let old = i32::from(*written) - limit;
            let mut others = with_numbers - weight * number * old as f32;
            if others > 0.0 {
                let mut other_squares = squares - weight * old as f32 * old as f32;
                let code = nearest(number * other_squares / others).clamp(-limit, limit - 1);
                if code != old {
                    others += weight * number * code as f32;
                    other_squares += weight * code as f32 * code as f32;
                    if other_squares > 0.0
                        && others * others * squares > with_numbers * with_numbers * other_squares
                    {
                        *written = (code + limit) as u8;
                        (with_numbers, squares) = (others, other_squares);
                        has_changed = true;
                    }
                }
            }
        }
        if !has_changed {
            break;
        }
    }
    match squares > 0.0 {
        true => with_numbers / squares,
        false => 0.0,
    }
}

/// The scales that [`Steps::scale_and_least`] tries, and the error that the search minimizes.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// The first addend of the largest code.
    first: f32,
    /// The difference of consecutive addends.
    step: f32,
    /// The last step. The search tries `last + 1` scales.
    last: usize,
    /// True if the error is the sum of absolute differences instead of squared differences.
    is_absolute: bool,
}

impl Steps {
    /// The scales to try with an importance matrix.
    pub const WEIGHTED: Self = Self::new(-0.9, 0.05, 36);

    pub const fn new(first: f32, step: f32, last: usize) -> Self {
        Self {
            first,
            step,
            last,
            is_absolute: false,
        }
    }

    /// Minimizes the sum of absolute differences.
    pub const fn of_absolute_differences(mut self) -> Self {
        self.is_absolute = true;
        self
    }

    /// Finds the scale and the minimum of a group with the smallest weighted error, ggml's `make_qkx2_quants` and
    /// `make_qkx3_quants`. The codes are 0 to `limit`. A code `q` stands for `scale · q - least`. Returns
    /// `(scale, least)`.
    pub fn scale_and_least(
        self,
        numbers: &[f32],
        limit: i32,
        weights: &[f32],
        codes: &mut [u8],
    ) -> (f32, f32) {
        let (mut least, mut most) = (numbers[0], numbers[0]);
        let mut sum_of_weights = weights[0];
        let mut sum_of_numbers = sum_of_weights * numbers[0];
        for (number, weight) in numbers.iter().zip(weights).skip(1) {
            if *number < least {
                least = *number;
            }
            if *number > most {
                most = *number;
            }
            sum_of_weights += weight;
            sum_of_numbers += weight * number;
        }
        if least > 0.0 {
            least = 0.0;
        }
        if most <= least {
            codes.fill(0);
            return (0.0, -least);
        }
        let code = |inverse: f32, least: f32, number: f32| {
            nearest(inverse * (number - least)).clamp(0, limit)
        };
        let error_of = |scale: f32, least: f32, code: f32, number: f32, weight: f32| {
            let difference = scale * code + least - number;
            let difference = match self.is_absolute {
                true => difference.abs(),
                false => difference * difference,
            };
            weight * difference
        };
        let inverse = limit as f32 / (most - least);
        let mut scale = 1.0 / inverse;
        let mut best = 0f32;
        for ((written, number), weight) in codes.iter_mut().zip(numbers).zip(weights) {
            *written = code(inverse, least, *number) as u8;
            best += error_of(scale, least, f32::from(*written), *number, *weight);
        }
        for step in 0..=self.last {
            // As in ggml, the range and the codes begin at the best minimum so far.
            let start = least;
            let inverse = (self.first + self.step * step as f32 + limit as f32) / (most - start);
            let (mut of_codes, mut squares, mut with_numbers) = (0f32, 0f32, 0f32);
            for (number, weight) in numbers.iter().zip(weights) {
                let code = code(inverse, start, *number) as f32;
                of_codes += weight * code;
                squares += weight * code * code;
                with_numbers += weight * code * number;
            }
            let determinant = sum_of_weights * squares - of_codes * of_codes;
            if determinant > 0.0 {
                let mut new_scale =
                    (sum_of_weights * with_numbers - sum_of_numbers * of_codes) / determinant;
                let mut new_least =
                    (squares * sum_of_numbers - of_codes * with_numbers) / determinant;
                if new_least > 0.0 {
                    new_least = 0.0;
                    new_scale = with_numbers / squares;
                }
                let mut error = 0f32;
                for (number, weight) in numbers.iter().zip(weights) {
                    let code = code(inverse, start, *number) as f32;
                    error += error_of(new_scale, new_least, code, *number, *weight);
                }
                if error < best {
                    for (written, number) in codes.iter_mut().zip(numbers) {
                        *written = code(inverse, start, *number) as u8;
                    }
                    (best, scale, least) = (error, new_scale, new_least);
                }
            }
        }
        (scale, -least)
    }
}

/// Finds the scale for codes from 0 to `limit` with the smallest weighted squared error, ggml's `make_qp_quants`. The
/// numbers are the scales or the minimums of the groups of a block.
pub(super) fn positive(numbers: &[f32], limit: i32, weights: &[f32], codes: &mut [u8]) -> f32 {
    let mut most = 0f32;
    for number in numbers {
        if *number >= most {
            most = *number;
        }
    }
    if most < ZERO_BELOW {
        codes.fill(0);
        return 0.0;
    }
    let mut inverse = limit as f32 / most;
    let scale = 1.0 / inverse;
    let mut best = 0f32;
    for (number, weight) in numbers.iter().zip(weights) {
        let difference = number - scale * f32::from(nearest(inverse * number) as u8);
        best += weight * difference * difference;
    }
    for step in (-4..=4).filter(|step| *step != 0) {
        let tried = (0.1 * step as f32 + limit as f32) / most;
        let scale = 1.0 / tried;
        let mut error = 0f32;
        for (number, weight) in numbers.iter().zip(weights) {
            let difference = number - scale * nearest(tried * number).min(limit) as f32;
            error += weight * difference * difference;
        }
        if error < best {
            (best, inverse) = (error, tried);
        }
    }
    let (mut with_numbers, mut squares) = (0f32, 0f32);
    for ((written, number), weight) in codes.iter_mut().zip(numbers).zip(weights) {
        let code = nearest(inverse * number).min(limit);
        *written = code as u8;
        with_numbers += weight * number * code as f32;
        squares += weight * code as f32 * code as f32;
    }
    for _ in 0..PASSES {
        let mut has_changed = false;
        for ((written, number), weight) in codes.iter_mut().zip(numbers).zip(weights) {
            let old = f32::from(*written);
            let mut others = with_numbers - weight * number * old;
            let mut other_squares = squares - weight * old * old;
            if others > 0.0 && other_squares > 0.0 {
                let code = nearest(number * other_squares / others).min(limit);
                if code != i32::from(*written) {
                    others += weight * number * code as f32;
                    other_squares += weight * code as f32 * code as f32;
                    if others * others * squares > with_numbers * with_numbers * other_squares {
                        *written = code as u8;
                        (with_numbers, squares) = (others, other_squares);
                        has_changed = true;
                    }
                }
            }
        }
        if !has_changed {
            break;
        }
    }
    match squares > 0.0 {
        true => with_numbers / squares,
        false => 0.0,
    }
}
