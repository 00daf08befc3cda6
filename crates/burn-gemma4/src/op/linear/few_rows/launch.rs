//! Launches the product of a few rows, divided so that the memory is kept busy.

#[cfg(feature = "cuda")]
use super::matrix_units;
use super::{
    FewRowsBackend, MOST_ROWS, MaybeMatrix, Origin, ProductOptions, ProductTensors,
    experts::{Items, OfExperts},
    kernel::{WeightStridesLaunch, project_overlapped},
    sums::{Epilogue, FactorPlaceLaunch, ProjectPlan},
    words,
};
use crate::{
    op::{
        launch::{plane_width, rows_of, vector_size},
        sums::Team,
    },
    quantized::layout::Layout,
};
use burn::backend::{
    cubecl::dtype_to_storage_type,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{
    CubeBackend, cubecl,
    kernel::{into_contiguous, untile},
    tensor::CubeTensor,
};
use cube_kit::{
    launch::{address_type, empty, exact_cube_count},
    overlap::{LOAD_BYTES, overlaps},
};
use cubecl::{client::Client, prelude::CubeDim};

impl FewRowsBackend for CubeBackend {
    fn product(tensors: ProductTensors<Self>, options: ProductOptions) -> FloatTensor<Self> {
        multiply(tensors, options)
    }

    fn gate_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = LaunchOptions::gated_by_experts(weight.clone(), chosen, rows);
        launch(input, weight, options)
    }

    fn mix_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = LaunchOptions::mixed(chosen, shares, rows);
        launch(input, weight, options)
    }

    fn gate_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self> {
        let options = LaunchOptions::gated_by_experts(words.clone(), chosen, rows);
        words::launch(input, words, layout, options)
    }

    fn mix_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self> {
        let options = LaunchOptions::mixed(chosen, shares, rows);
        words::launch(input, words, layout, options)
    }
}

/// `[matrices, rows, columns]` as one below the other, and the rows of each. Rows may be padded, as a device's memory likes them: a reshape
/// would copy all matrices for each token.
fn flat_matrices(weight: CubeTensor) -> (CubeTensor, usize) {
    let weight = untile(weight);
    let [count, rows, _] = weight.meta.shape().dims();
    let strides = weight.meta.strides();
    let mut flat = match strides[2] == 1 && strides[0] == rows * strides[1] {
        true => weight,
        false => into_contiguous(weight),
    };
    flat.meta.remove(0);
    flat.meta.shape_mut()[0] = count * rows;
    (flat, rows)
}

pub(super) fn multiply(
    tensors: ProductTensors<CubeBackend>,
    options: ProductOptions,
) -> CubeTensor {
    let launched = LaunchOptions::of(&tensors, options);
    let first = tensor_of(&tensors.first).expect("a product has a matrix");
    match options.layout {
        None => launch(tensors.input, first, launched),
        Some(layout) => words::launch(tensors.input, first, layout, launched),
    }
}

fn tensor_of(matrix: &MaybeMatrix<CubeBackend>) -> Option<CubeTensor> {
    match matrix {
        MaybeMatrix::Absent => None,
        MaybeMatrix::Whole(matrix) | MaybeMatrix::Words(matrix) => Some(matrix.clone()),
    }
}

/// What a product does beside adding up.
pub(super) struct LaunchOptions {
    pub gelu: bool,
    /// Whether the first weights open the gates of the second ones; else their outputs lie side by side.
    pub gated: bool,
    pub second: Option<CubeTensor>,
    pub third: Option<CubeTensor>,
    /// A factor of the output, and its first column.
    pub factor: Option<(CubeTensor, usize)>,
    pub cap: Option<f64>,
    pub origin: Origin,
    /// Whose matrices they are, where there are several.
    pub experts: Option<OfExperts>,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            gelu: false,
            gated: false,
            second: None,
            third: None,
            factor: None,
            cap: None,
            origin: Origin::Computed,
            experts: None,
        }
    }
}

impl LaunchOptions {
    pub fn of(tensors: &ProductTensors<CubeBackend>, options: ProductOptions) -> Self {
        let factor = tensor_of(&tensors.through);
        Self {
            gelu: options.gated || factor.is_some(),
            gated: options.gated,
            second: tensor_of(&tensors.second),
            third: tensor_of(&tensors.third),
            factor: factor.map(|factor| (factor, options.start)),
            cap: options.cap,
            origin: options.origin,
            experts: None,
        }
    }

    /// Whether no launch writes the matrices, these and the first: nor one that gives them another layout.
    pub fn reads_parameters(&self, first: &CubeTensor) -> bool {
        let matrices = [Some(first), self.second.as_ref(), self.third.as_ref()];
        let stays = |matrix: &CubeTensor| {
            !matrix.meta.is_tiled() && matrix.meta.strides().last() == Some(&1)
        };
        self.origin == Origin::Parameters && matrices.into_iter().flatten().all(stays)
    }

    fn gated_by_experts(weight: CubeTensor, chosen: CubeTensor, rows: usize) -> Self {
        Self {
            gelu: true,
            gated: true,
            second: Some(weight),
            experts: Some(OfExperts {
                chosen: into_contiguous(chosen),
                shares: None,
                rows,
            }),
            ..Self::default()
        }
    }

    fn mixed(chosen: CubeTensor, shares: CubeTensor, rows: usize) -> Self {
        Self {
            experts: Some(OfExperts {
                chosen: into_contiguous(chosen),
                shares: Some(into_contiguous(shares)),
                rows,
            }),
            ..Self::default()
        }
    }

    /// The items of a product of so many rows with a first matrix of so many.
    pub fn items(&self, rows: usize, of_matrix: usize) -> Items {
        if let Some(experts) = &self.experts {
            return Items::of_experts(experts, self.gated);
        }
        let rows_of = |matrix: &CubeTensor| matrix.meta.shape()[0];
        let beside = match self.gated {
            true => [None, None],
            false => [self.second.as_ref(), self.third.as_ref()],
        };
        let beside = beside.into_iter().flatten().map(rows_of);
        Items::of_matrices(rows, std::iter::once(of_matrix).chain(beside))
    }

    /// Matrices whose outputs lie side by side.
    pub fn sides(&self) -> usize {
        match self.gated {
            true => 1,
            false => 1 + self.second.iter().chain(&self.third).count(),
        }
    }

    /// The experts of each row, and what they contribute.
    pub fn experts(&mut self) -> [Option<CubeTensor>; 2] {
        match self.experts.take() {
            Some(experts) => [Some(experts.chosen), experts.shares],
            None => [None, None],
        }
    }

    /// The factor, and where it lies.
    pub fn factor(&mut self) -> (Option<CubeTensor>, FactorPlaceLaunch) {
        match self.factor.take() {
            Some((factor, start)) => {
                let factor = rows_of(factor);
                let stride = factor.meta.strides()[0];
                let place = FactorPlaceLaunch::new(start as u32, stride as u32);
                (Some(factor), place)
            }
            None => (None, FactorPlaceLaunch::new(0, 0)),
        }
    }

    pub fn epilogue(&self) -> Epilogue {
        Epilogue {
            gelu: self.gelu,
            capped: self.cap.is_some(),
        }
    }
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
fn launch(input: CubeTensor, weight: CubeTensor, mut options: LaunchOptions) -> CubeTensor {
    #[cfg(feature = "cuda")]
    if let Some(plan) = matrix_units::plan_of_whole(&input, &weight, &options) {
        return matrix_units::multiply(input, weight, options, plan);
    }
    let client = input.client.clone();
    let reads_parameters = options.reads_parameters(&weight);
    let (input, weight) = (into_contiguous(input), rows_of(weight));
    let [rows, inner] = [input.meta.shape()[0], input.meta.shape()[1]];
    let items = options.items(rows, weight.meta.shape()[0]);
    let [second, third] = [&options.second, &options.third].map(|side| side.clone().map(rows_of));
    let stride = |tensor: &CubeTensor| tensor.meta.strides()[0];
    for matrix in [&weight].into_iter().chain(&second).chain(&third) {
        assert_eq!(matrix.meta.shape()[1], inner, "as many columns as the rows");
    }
    let strides = [
        stride(&weight),
        second.as_ref().map_or(0, stride),
        third.as_ref().map_or(0, stride),
    ];
    let [of_first, of_second, of_third] = strides;
    let vector = vector_size(
        &client,
        input.dtype.size(),
        &[inner, of_first, of_second, of_third],
    );
    let vectors = inner / vector;
    let [of_first, of_second, of_third] = strides.map(|stride| (stride / vector) as u32);
    let output = empty(&input, [items.rows_out, items.outputs()], input.dtype);
    let plan = plan(&client, items, vectors, &options, IN_FLIGHT);
    let plan = ProjectPlan {
        // Of several rows, whose sums take the registers, it was not measured.
        reads_ahead: plan.overlaps
            && rows == 1
            && reads_parameters
            && vector * weight.dtype.size() == LOAD_BYTES,
        ..plan
    };
    let (factor, factor_place) = options.factor();
    let [experts, shares] = options.experts();
    let address_type = address_type(
        [&input, &weight, &output]
            .into_iter()
            .chain(&second)
            .chain(&third)
            .chain(&factor),
    );
    let element = dtype_to_storage_type(input.dtype);
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    // SAFETY: a unit reads vectors of the rows that the shapes have, of experts of those that were chosen among them, and writes the outputs
    // below those of its item or matrix.
    unsafe {
        project_overlapped::launch_unchecked(
            &client,
            exact_cube_count(&client, items.count * items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type,
            input.into_tensor_arg(),
            weight.into_tensor_arg(),
            argument(second).into(),
            argument(third).into(),
            argument(experts).into(),
            argument(shares).into(),
            argument(factor).into(),
            output.clone().into_tensor_arg(),
            factor_place,
            items.place(plan, vectors),
            items.sides.launch(plan),
            WeightStridesLaunch::new(of_first, of_second, of_third),
            (items.inner() * vectors) as u32,
            options.cap.unwrap_or(1.0) as f32,
            plan,
            options.epilogue(),
            element,
            vector,
        );
    }
    output
}

/// Vectors of weights that a unit has in flight.
const IN_FLIGHT: usize = 8;

/// Enough units to keep the memory busy, and enough weights for each read of the input. `vectors` are those of one row of
/// a matrix.
pub(super) fn plan(
    client: &Client,
    items: Items,
    vectors: usize,
    options: &LaunchOptions,
    in_flight: usize,
) -> ProjectPlan {
    let (rows, outputs) = (items.rows, items.outputs() * items.count);
    let vectors = vectors * items.inner();
    let gated = options.gated;
    assert!(
        rows <= MOST_ROWS,
        "{rows} rows: the kernel takes at most {MOST_ROWS}"
    );
    let width = plane_width(client);
    let processors = client
        .properties()
        .hardware
        .num_streaming_multiprocessors
        .unwrap_or(16) as usize;
    let of_team = match (rows, gated) {
        (1, true) => 1,
        (1, false) | (_, true) => 2,
        (2..=4, false) => 2,
        (_, false) => 4,
    };
    let of_team = of_team.min(outputs.next_power_of_two());
    // Without plane operations every unit leaves its own part in shared memory.
    let (mut units, most_units) = if width == 1 { (8, 32) } else { (width, 256) };
    let teams_in_all = outputs.div_ceil(of_team);
    while units < most_units
        && vectors.is_multiple_of(2 * units)
        && teams_in_all * units < processors * 1024
    {
        units *= 2;
    }
    let cube = if width == 1 { 64 } else { 256.max(width) };
    let steps = vectors / units;
    let in_flight = in_flight / (of_team * if gated { 2 } else { 1 });
    let unroll = match vectors.is_multiple_of(units) {
        true => (1..=in_flight.max(1))
            .rev()
            .find(|unroll| steps.is_multiple_of(*unroll)),
        false => None,
    };
    let teams = (cube / units).max(1);
    let overlaps = overlaps(client);
    ProjectPlan {
        rows,
        outputs: of_team,
        gated,
        team: Team { units, width },
        teams,
        ranks: items.ranks,
        sides: options.sides(),
        unroll: unroll.unwrap_or(1),
        overlaps,
        reads_ahead: false,
    }
}
