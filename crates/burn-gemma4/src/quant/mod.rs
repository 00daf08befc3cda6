//! Quantized weights: file formats and dequantization. The results are bit-identical to those of the programs that
//! define the formats.

pub(crate) mod blocks;
mod codebooks;
pub(crate) mod encode;
pub(crate) mod fp4;
pub(crate) mod fp8;
pub(crate) mod mobile;
pub(crate) mod pack;
pub(crate) mod packed;
pub(crate) mod quantize;
pub(crate) mod rows;
pub(crate) mod scheme;
mod small_super_blocks;
mod super_blocks;

pub(crate) use cpu_gemv::layout;
