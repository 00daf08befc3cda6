//! Products of quantized weights by int8 dot products.
//!
//! The input is rounded to [fixed point](crate::fixed_point) of 24 bits, in three limbs of a signed byte. Int8 dot
//! products multiply the codes by each limb, and their sums are exact. The sum of a few columns is converted to f32
//! once. The product of the group's scale and the unit multiplies the sum.
//!
//! Weights whose codes equal the zero point give exactly 0.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
