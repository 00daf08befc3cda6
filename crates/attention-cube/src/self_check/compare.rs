//! The rule by which the self-check accepts a result. It is the rule of the operator's tests: a result may have twice
//! the error of the same mathematics in the problem's dtype, and the rounding error of one more store.

use burn::tensor::DType;

/// Compares a result with the exact result. `rounded` is the result of the same mathematics in the problem's dtype.
///
/// # Errors
/// Returns the reason why the result is wrong. `name` is the name of the result.
pub(super) fn check_result(
    name: &str,
    got: &[f64],
    exact: &[f64],
    rounded: &[f64],
    dtype: DType,
) -> Result<(), String> {
    if got.len() != exact.len() {
        return Err(format!(
            "its matrix units give {} elements of the {name} instead of {}",
            got.len(),
            exact.len()
        ));
    }
    if let Some(element) = got.iter().find(|element| !element.is_finite()) {
        return Err(format!(
            "its matrix units give {element} as an element of the {name}"
        ));
    }
    let epsilon = match dtype {
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    let (found, baseline) = (Errors::new(got, exact), Errors::new(rounded, exact));
    let size = Errors::new(exact, &vec![0.0; exact.len()]);
    let allowed = Errors {
        mean: 2.0 * baseline.mean + epsilon / 4.0 * size.mean,
        worst: 2.0 * baseline.worst + epsilon / 2.0 * size.worst,
    };
    log::debug!(
        "attention: the {name} in fragments has {:.2} of the allowed error in the mean, {:.2} at the worst element",
        found.mean / allowed.mean,
        found.worst / allowed.worst
    );
    match found.mean <= allowed.mean && found.worst <= allowed.worst {
        true => Ok(()),
        false => Err(format!(
            "its matrix units give a wrong {name}: the error is {:.1e} in the mean and {:.1e} at the worst element, \
             and {:.1e} and {:.1e} are allowed",
            found.mean, found.worst, allowed.mean, allowed.worst
        )),
    }
}

/// The errors of a result: the root mean square of all elements, and the largest.
struct Errors {
    mean: f64,
    worst: f64,
}

impl Errors {
    fn new(got: &[f64], exact: &[f64]) -> Self {
        let errors = got.iter().zip(exact).map(|(got, exact)| got - exact);
        let squares: f64 = errors.clone().map(|error| error * error).sum();
        Self {
            mean: (squares / exact.len().max(1) as f64).sqrt(),
            worst: errors.map(f64::abs).fold(0.0, f64::max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_result_finds_one_wrong_element_and_nan() {
        let exact: Vec<f64> = (0..100_000).map(|i| f64::from(i % 7) - 3.0).collect();
        let rounded: Vec<f64> = exact.iter().map(|x| x * 1.001).collect();
        let check = |got: &[f64]| check_result("output", got, &exact, &rounded, DType::BF16);
        assert_eq!(check(&rounded), Ok(()));
        let mut wrong = rounded.clone();
        wrong[5000] = 2.5;
        let error = check(&wrong).expect_err("an element is wrong");
        assert!(error.contains("a wrong output"), "{error}");
        wrong[5000] = f64::NAN;
        let error = check(&wrong).expect_err("an element is NaN");
        assert!(error.contains("NaN as an element of the output"), "{error}");
        let error = check(&[]).expect_err("elements are missing");
        assert!(error.contains("0 elements"), "{error}");
    }
}
