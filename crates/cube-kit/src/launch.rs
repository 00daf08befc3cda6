//! Launches: new outputs, grids, the width of addresses.

use burn::tensor::{DType, Shape};
use burn_cubecl::{cubecl, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::prelude::{AddressType, CubeCount};

/// A new contiguous tensor beside `like`.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

/// The launch of `cubes` cubes, which may be more than fit one dimension.
pub fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0 as usize;
    let cubes = cubes.max(1);
    let rows = cubes.div_ceil(limit);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

/// The width of addresses that reach every element of `tensors`.
pub fn address_type<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors
        .into_iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// The launch of `cubes` cubes and no more.
///
/// # Panics
/// Where no grid of the device has so many.
pub fn exact_cube_count(client: &Client, cubes: usize) -> CubeCount {
    let count = cube_count(client, cubes);
    let CubeCount::Static(columns, rows, _) = count else {
        unreachable!("it is static");
    };
    assert_eq!(
        columns as usize * rows as usize,
        cubes,
        "{cubes} cubes fit no grid of this device"
    );
    count
}
