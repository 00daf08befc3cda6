//! The choice of kernels by the CPU's instruction set.

#[cfg(target_arch = "x86_64")]
use crate::dots;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::fixed;
use crate::formats::{
    Bf16, Codes, EightBits, F16, F32, FiveBits, Floats, FourBits, FourBitsOfBook, SixBits,
};
use crate::input::{Order, Reads};
use crate::kernel::{Format, Kernel, Task};
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Simd};
use std::{ops::Range, sync::OnceLock};

/// An instruction set for which there are kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, on any CPU.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 with the extensions F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with the extensions F, BW, VL, DQ and VNNI, and BMI2. VNNI has dot products of bytes.
    Avx512Vnni,
    /// The instructions of [`Avx512Vnni`](Self::Avx512Vnni) with the extension BF16, which has dot products of bf16
    /// pairs.
    Avx512Bf16,
    /// NEON.
    Neon,
    /// NEON with the extension DotProd: dot products of signed bytes, of Armv8.2.
    NeonDot,
    /// NEON with the extensions DotProd and I8MM. The last extension has products of matrices of signed bytes, of
    /// Armv8.6.
    NeonI8mm,
}

impl Isa {
    /// Returns the instruction sets that this CPU supports. The last instruction set in the list is the fastest.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "some CPUs have only the portable kernels")]
        let mut found = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if has_avx2 {
                found.push(Self::Avx2);
            }
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            if has_avx2 && has_avx512 {
                found.push(Self::Avx512);
                let has_vnni =
                    is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("bmi2");
                if has_vnni {
                    found.push(Self::Avx512Vnni);
                    if is_x86_feature_detected!("avx512bf16") {
                        found.push(Self::Avx512Bf16);
                    }
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            found.push(Self::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                found.push(Self::NeonDot);
                if std::arch::is_aarch64_feature_detected!("i8mm") {
                    found.push(Self::NeonI8mm);
                }
            }
        }
        found
    }

    /// Returns the fastest instruction set of this CPU.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().pop().unwrap_or(Self::Portable))
    }

    /// True if the kernel of several rows multiplies more weights per instruction than an instruction on f32 does.
    /// `has_halves` is true if the input is in bf16.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_variables, reason = "many rows were measured on x86-64 only")
    )]
    pub(crate) fn has_fast_chunks(self, format: Format, has_halves: bool) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let has_dots = self == Self::Avx512Bf16 && has_halves && dots_serve(format);
            let has_vnni = matches!(self, Self::Avx512Vnni | Self::Avx512Bf16);
            has_dots || (has_vnni && fixed::avx512::kernel(format, crate::kernel::CHUNK).is_some())
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Returns the kernel of a format for `rows` input rows. `has_halves` is true if these rows are in bf16.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_variables, reason = "only x86-64 has kernels for input in bf16")
    )]
    pub(crate) fn kernel(self, format: Format, rows: usize, has_halves: bool) -> Kernel {
        match self {
            Self::Portable => portable::kernel(format, rows),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::kernel(format, rows),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::kernel(format, rows),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni | Self::Avx512Bf16 => {
                // With several rows, dot products of bf16 take fewer instructions. With four rows and Q4_0 they take
                // two thirds of the time.
                let has_dots = self == Self::Avx512Bf16 && has_halves && dots_serve(format);
                let fixed = match has_dots && rows > 1 {
                    true => None,
                    false => fixed::avx512::kernel(format, rows),
                };
                fixed.unwrap_or_else(|| match has_dots {
                    true => dots_kernel(format, rows),
                    false => avx512::kernel(format, rows),
                })
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon | Self::NeonDot | Self::NeonI8mm => {
                let kernel =
                    fixed::neon::kernel(format, rows, self != Self::Neon, self == Self::NeonI8mm);
                kernel.unwrap_or_else(|| neon::kernel(format, rows))
            }
            #[allow(unreachable_patterns, reason = "each architecture has other sets")]
            _ => panic!("isa: {self:?} is not of this architecture; expected one of `available`"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn dots_serve(format: Format) -> bool {
    match format {
        Format::Bf16 => true,
        Format::F32 | Format::F16 => false,
        Format::Words(layout) => dots::serves(layout),
    }
}

/// Returns the kernel for input rows in bf16.
#[cfg(target_arch = "x86_64")]
fn dots_kernel(format: Format, rows: usize) -> Kernel {
    fn of_codes<const BITS: usize>(rows: usize) -> (unsafe fn(&Task, Range<usize>), usize) {
        match rows {
            1 => (dots::codes::<BITS, 1>, 1),
            2 => (dots::codes::<BITS, 2>, 2),
            3 => (dots::codes::<BITS, 3>, 3),
            4 => (dots::codes::<BITS, 4>, 4),
            5 | 6 => (dots::codes::<BITS, 6>, 6),
            _ => (dots::codes::<BITS, 8>, 8),
        }
    }
    let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match (format, rows) {
        (Format::Words(layout), _) if layout.format.bits == 6 => of_codes::<6>(rows),
        (Format::Words(_), _) => of_codes::<4>(rows),
        (_, 1) => (dots::floats::<1, 4>, 1),
        (_, 2) => (dots::floats::<2, 2>, 2),
        (_, 3) => (dots::floats::<3, 2>, 3),
        (_, 4) => (dots::floats::<4, 2>, 4),
        (_, 5 | 6) => (dots::floats::<6, 1>, 6),
        _ => (dots::floats::<8, 1>, 8),
    };
    let order = match format {
        Format::Words(_) => Order {
            steps: dots::CODE_STEPS,
            lanes: dots::HALVES,
            column: |step, lane| dots::CODE_STEPS * lane + step,
        },
        _ => Order {
            steps: dots::FLOAT_STEPS,
            lanes: dots::HALVES,
            column: |step, lane| step * dots::HALVES + lane,
        },
    };
    let reads = Reads::Bf16(order);
    Kernel { run, rows, reads }
}

/// Defines the kernels of an instruction set. The numbers of each kernel of float weights are the arguments `N`, `R`
/// and `A` of [`floats`](crate::kernel::floats), in the order of `R`.
macro_rules! kernels {
    (
        $name:ident, $simd:ty, $features:meta,
        $([$n:literal, $r:literal, $a:literal]),*; [$n_last:literal, $r_last:literal, $a_last:literal]
    ) => {
        mod $name {
            use super::*;

            #[$features]
            unsafe fn floats<F: Floats<$simd>, const N: usize, const R: usize, const A: usize>(
                task: &Task,
                range: Range<usize>,
            ) {
                unsafe { crate::kernel::floats::<$simd, F, N, R, A>(task, range) }
            }

            #[$features]
            unsafe fn quantized<C: Codes<$simd>, const R: usize>(task: &Task, range: Range<usize>) {
                if let Some(layout) = task.layout {
                    unsafe { crate::kernel::quantized::<$simd, C, R>(task, layout, range) }
                }
            }

            fn of_floats<F: Floats<$simd>>(rows: usize) -> Kernel {
                let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match rows {
                    $(..=$r => (floats::<F, $n, $r, $a>, $r),)*
                    _ => (floats::<F, $n_last, $r_last, $a_last>, $r_last),
                };
                let order = Order {
                    steps: F::STEPS,
                    lanes: <$simd>::LANES,
                    column: F::column,
                };
                let reads = Reads::F32(order);
                Kernel { run, rows, reads }
            }

            fn of_codes<C: Codes<$simd>>(rows: usize) -> Kernel {
                let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match rows {
                    1 => (quantized::<C, 1>, 1),
                    2 => (quantized::<C, 2>, 2),
                    3 => (quantized::<C, 3>, 3),
                    4 => (quantized::<C, 4>, 4),
                    5 | 6 => (quantized::<C, 6>, 6),
                    _ => (quantized::<C, 8>, 8),
                };
                let order = Order {
                    steps: C::CODES,
                    lanes: <$simd>::LANES,
                    column: |step, lane| lane * C::CODES + step,
                };
                let reads = Reads::F32(order);
                Kernel { run, rows, reads }
            }

            pub(super) fn kernel(format: Format, rows: usize) -> Kernel {
                match format {
                    Format::F32 => of_floats::<F32>(rows),
                    Format::F16 => of_floats::<F16>(rows),
                    Format::Bf16 => of_floats::<Bf16>(rows),
                    Format::Words(layout) => match layout.format.bits {
                        4 if layout.format.codebook.is_some() => {
                            of_codes::<FourBitsOfBook>(rows)
                        }
                        4 => of_codes::<FourBits>(rows),
                        5 => of_codes::<FiveBits>(rows),
                        6 => of_codes::<SixBits>(rows),
                        _ => of_codes::<EightBits>(rows),
                    },
                }
            }
        }
    };
}

/// The kernels of float weights on x86-64 and in plain Rust read one or two rows of the weights at once.
macro_rules! wide_kernels {
    ($name:ident, $simd:ty, $features:meta) => {
        kernels!(
            $name,
            $simd,
            $features,
            [1, 1, 4],
            [1, 2, 2],
            [1, 3, 2],
            [1, 4, 1],
            [2, 6, 1];
            [2, 8, 1]
        );
    };
}

wide_kernels!(portable, Portable, inline(never));
#[cfg(target_arch = "x86_64")]
wide_kernels!(avx2, Avx2, target_feature(enable = "avx2,fma,f16c"));
#[cfg(target_arch = "x86_64")]
wide_kernels!(
    avx512,
    Avx512,
    target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
);
// A core has up to four units that multiply and add, with a latency of 4 cycles. At least 12 sums therefore grow at
// once. Rows of the weights share the loads of the input, which are as long as those of f32 weights.
#[cfg(target_arch = "aarch64")]
kernels!(
    neon,
    Neon,
    target_feature(enable = "neon"),
    [4, 1, 4],
    [4, 2, 2],
    [4, 3, 1],
    [4, 4, 1],
    [3, 6, 1];
    [3, 8, 1]
);
