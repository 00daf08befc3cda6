//! Launch helpers: output tensors, grid sizes, and the width of addresses.

use burn::tensor::{DType, Shape};
use burn_cubecl::{cubecl, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::prelude::{AddressType, CubeCount};

/// Allocates an uninitialized contiguous tensor on the device of `like`.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

/// Returns a grid of at least `cubes` cubes. If one dimension cannot hold all cubes, the grid has a second dimension
/// and may have a few more cubes.
pub fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0 as usize;
    let cubes = cubes.max(1);
    let rows = cubes.div_ceil(limit);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

/// Returns the smallest address width that lets kernels address every element of `tensors`.
pub fn address_type<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors
        .into_iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// Returns a grid of exactly `cubes` cubes.
///
/// # Panics
/// Panics if the device supports no grid of exactly this size.
pub fn exact_cube_count(client: &Client, cubes: usize) -> CubeCount {
    let count = cube_count(client, cubes);
    let CubeCount::Static(columns, rows, _) = count else {
        unreachable!("cube_count returns a static count");
    };
    assert_eq!(
        columns as usize * rows as usize,
        cubes,
        "no grid of this device has exactly {cubes} cubes"
    );
    count
}
