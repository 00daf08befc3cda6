//! Launches the kernels of an optimizer step.

use super::{
    PARTS, Rounded, SquaredGradients, UpdateBackend, Updated, drawn,
    formula::Formula,
    kernel::{AT_ONCE, CoefficientsLaunch, CountsLaunch, adamw, adamw_rounded, add_squares, round},
};
use crate::op::launch::{own, team, vector_size};
use burn::{
    backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor},
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty, exact_cube_count};
use cubecl::{
    client::Client,
    prelude::{CubeCount, CubeDim},
};

/// The number of units in a cube; each unit handles one vector.
const UNITS: usize = 256;

/// Returns the number of vectors in a tensor, and the number of elements per vector. `bytes` is the size of the widest
/// element type among the tensors of the launch.
fn vectors(tensor: &CubeTensor, bytes: usize) -> (u32, usize) {
    let count = tensor.meta.num_elements();
    let vector = vector_size(&tensor.client, bytes, &[count]);
    let vectors = u32::try_from(count / vector);
    (
        vectors.expect("the number of vectors of a parameter fits in u32"),
        vector,
    )
}

/// Returns a grid with one unit for each vector.
fn grid(client: &Client, vectors: u32) -> (CubeCount, CubeDim) {
    let cubes = (vectors as usize).div_ceil(UNITS);
    (cube_count(client, cubes), CubeDim::new_1d(UNITS as u32))
}

/// The tensors of an AdamW step. The weights and running means are in f32, in buffers that no other handle shares.
struct Operands {
    gradient: CubeTensor,
    weight: CubeTensor,
    mean: CubeTensor,
    square: CubeTensor,
}

impl Operands {
    fn new([gradient, weight, mean, square]: [CubeTensor; 4]) -> Self {
        Self {
            gradient: into_contiguous(gradient),
            weight: own(weight),
            mean: own(mean),
            square: own(square),
        }
    }
}

fn coefficients(formula: Formula) -> CoefficientsLaunch {
    CoefficientsLaunch::new(
        formula.kept_mean,
        formula.kept_square,
        formula.new_mean,
        formula.new_square,
        formula.of_mean,
        formula.of_square,
        formula.epsilon,
        formula.kept_weight,
        formula.rate,
    )
}

impl UpdateBackend for CubeBackend {
    fn add_squares(
        gradients: SquaredGradients<Self>,
        count: usize,
        sums: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let SquaredGradients {
            first,
            second,
            third,
            fourth,
            fifth,
            sixth,
        } = gradients;
        let gradients = [first, second, third, fourth, fifth, sixth].map(into_contiguous);
        let sums = own(sums);
        let client = sums.client.clone();
        let dtype = gradients[0].dtype;
        let sizes = gradients
            .each_ref()
            .map(|gradient| gradient.meta.num_elements());
        let vector = vector_size(&client, dtype.size(), &sizes);
        let vectors = sizes.map(|size| size / vector);
        let most = vectors.into_iter().max().unwrap_or(0);
        let team = team(&client, most);
        let cubes = most.div_ceil(team.units).clamp(1, PARTS);
        let address = address_type(gradients.each_ref());
        let mut counts = (0..AT_ONCE).map(|place| match place < count {
            true => u32::try_from(vectors[place])
                .expect("the number of vectors of a parameter fits in u32"),
            false => 0,
        });
        let mut next = || counts.next().unwrap_or(0);
        let counts = CountsLaunch::new(next(), next(), next(), next(), next(), next());
        let [first, second, third, fourth, fifth, sixth] =
            gradients.map(CubeTensor::into_tensor_arg);
        // SAFETY: a cube reads vector `i` of a gradient only if `i` is below the gradient's number of vectors in `counts`. A
        // cube writes only its own element of `sums`. `sums` has `PARTS` elements, and the launch has at most `PARTS` cubes.
        unsafe {
            add_squares::launch_unchecked(
                &client,
                exact_cube_count(&client, cubes),
                CubeDim::new_1d(team.units as u32),
                address,
                first,
                second,
                third,
                fourth,
                fifth,
                sixth,
                sums.clone().into_tensor_arg(),
                counts,
                team,
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        sums
    }

    fn adamw(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        square: FloatTensor<Self>,
        formula: Formula,
    ) -> Updated<Self> {
        let own = Operands::new([gradient, weight, mean, square]);
        let client = own.weight.client.clone();
        let (vectors, vector) = vectors(&own.weight, size_of::<f32>());
        let (count, dim) = grid(&client, vectors);
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of the gradient, the weight and both running
        // means. The unit accesses only vector `i` of these tensors, and the single element of `factor`.
        unsafe {
            adamw::launch_unchecked(
                &client,
                count,
                dim,
                address_type([&own.weight]),
                own.gradient.clone().into_tensor_arg(),
                into_contiguous(factor).into_tensor_arg(),
                own.weight.clone().into_tensor_arg(),
                own.mean.clone().into_tensor_arg(),
                own.square.clone().into_tensor_arg(),
                coefficients(formula),
                vectors,
                dtype_to_storage_type(own.gradient.dtype),
                vector,
            );
        }
        Updated {
            weight: own.weight,
            mean: own.mean,
            square: own.square,
        }
    }

    fn adamw_rounded(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        square: FloatTensor<Self>,
        formula: Formula,
        dtype: DType,
    ) -> Rounded<Self> {
        let own = Operands::new([gradient, weight, mean, square]);
        let client = own.weight.client.clone();
        let rounded = empty(&own.weight, own.weight.meta.shape().clone(), dtype);
        let (vectors, vector) = vectors(&own.weight, size_of::<f32>());
        let (count, dim) = grid(&client, vectors);
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of all tensors except `factor`. The unit
        // accesses only vector `i` of these tensors, and the single element of `factor`.
        unsafe {
            adamw_rounded::launch_unchecked(
                &client,
                count,
                dim,
                address_type([&own.weight]),
                own.gradient.clone().into_tensor_arg(),
                into_contiguous(factor).into_tensor_arg(),
                own.weight.clone().into_tensor_arg(),
                own.mean.clone().into_tensor_arg(),
                own.square.clone().into_tensor_arg(),
                rounded.clone().into_tensor_arg(),
                coefficients(formula),
                vectors,
                drawn(dtype),
                dtype_to_storage_type(own.gradient.dtype),
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        Rounded {
            rounded,
            weight: own.weight,
            mean: own.mean,
            square: own.square,
        }
    }

    fn round(weight: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        let weight = into_contiguous(weight);
        let client = weight.client.clone();
        let rounded = empty(&weight, weight.meta.shape().clone(), dtype);
        let (vectors, vector) = vectors(&weight, size_of::<f32>());
        let (count, dim) = grid(&client, vectors);
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of both tensors. The unit reads vector `i` of
        // `weight`, and writes vector `i` of `rounded`.
        unsafe {
            round::launch_unchecked(
                &client,
                count,
                dim,
                address_type([&weight]),
                weight.clone().into_tensor_arg(),
                rounded.clone().into_tensor_arg(),
                vectors,
                drawn(dtype),
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        rounded
    }
}
