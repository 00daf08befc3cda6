//! Launches the product of a few rows, divided so that the memory is kept busy.

use super::{
    FewRowsBackend, MOST_ROWS,
    experts::{Items, OfExperts},
    kernel::project,
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
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Shape,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cubecl::{client::Client, prelude::CubeDim};

impl FewRowsBackend for CubeBackend {
    fn project(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cap: Option<f64>,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            cap,
            ..ProductOptions::default()
        };
        launch(input, weight, options)
    }

    fn project_gated(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            through: Some(through),
            ..ProductOptions::default()
        };
        launch(input, gate, options)
    }

    fn project_gate_of(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            factor: Some((through, start)),
            ..ProductOptions::default()
        };
        launch(input, gate, options)
    }

    fn project_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
        cap: Option<f64>,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            cap,
            ..ProductOptions::default()
        };
        words::launch(input, words, layout, options)
    }

    fn project_words_gated(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        through: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            through: Some(through),
            ..ProductOptions::default()
        };
        words::launch(input, words, layout, options)
    }

    fn project_words_gate_of(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        through: FloatTensor<Self>,
        layout: Layout,
        start: usize,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            factor: Some((through, start)),
            ..ProductOptions::default()
        };
        words::launch(input, words, layout, options)
    }

    fn gate_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = ProductOptions::gated_by_experts(weight.clone(), chosen, rows);
        launch(input, weight, options)
    }

    fn mix_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = ProductOptions::mixed(chosen, shares, rows);
        launch(input, weight, options)
    }

    fn gate_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self> {
        let options = ProductOptions::gated_by_experts(words.clone(), chosen, rows);
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
        let options = ProductOptions::mixed(chosen, shares, rows);
        words::launch(input, words, layout, options)
    }
}

/// `[matrices, rows, columns]` as one below the other, and the rows of each.
fn flat_matrices(weight: CubeTensor) -> (CubeTensor, usize) {
    let weight = into_contiguous(weight);
    let [count, rows, columns] = weight.meta.shape().dims();
    let flat = burn_cubecl::ops::reshape(weight, Shape::new([count * rows, columns]));
    (flat, rows)
}

/// What a product does beside adding up.
#[derive(Default)]
pub(super) struct ProductOptions {
    pub gelu: bool,
    /// The weights that the first ones open the gates of.
    pub through: Option<CubeTensor>,
    /// A factor of the output, and its first column.
    pub factor: Option<(CubeTensor, usize)>,
    pub cap: Option<f64>,
    /// Whose matrices they are, where there are several.
    pub experts: Option<OfExperts>,
}

impl ProductOptions {
    fn gated_by_experts(weight: CubeTensor, chosen: CubeTensor, rows: usize) -> Self {
        Self {
            gelu: true,
            through: Some(weight),
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

    /// The items of a product of so many rows with a matrix of so many.
    pub fn items(&self, rows: usize, of_matrix: usize) -> Items {
        match &self.experts {
            Some(experts) => Items::of_experts(experts, self.through.is_some()),
            None => Items::of_matrix(rows, of_matrix),
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
fn launch(input: CubeTensor, weight: CubeTensor, mut options: ProductOptions) -> CubeTensor {
    let client = input.client.clone();
    let (input, weight) = (into_contiguous(input), rows_of(weight));
    let [rows, inner] = [input.meta.shape()[0], input.meta.shape()[1]];
    let items = options.items(rows, weight.meta.shape()[0]);
    let through = options.through.take().map(rows_of);
    let stride = |tensor: &CubeTensor| tensor.meta.strides()[0];
    let through_stride = through.as_ref().map_or(0, stride);
    let vector = vector_size(
        &client,
        input.dtype.size(),
        &[inner, stride(&weight), through_stride],
    );
    let vectors = inner / vector;
    let output = empty(&input, [items.rows_out, items.outputs], input.dtype);
    let plan = plan(&client, items, vectors, through.is_some(), IN_FLIGHT);
    let (factor, factor_place) = options.factor();
    let [experts, shares] = options.experts();
    let address_type = address_type(
        [&input, &weight, &output]
            .into_iter()
            .chain(&through)
            .chain(&factor),
    );
    let element = dtype_to_storage_type(input.dtype);
    // SAFETY: a unit reads vectors of the rows that the shapes have, of experts of those that were chosen among them, and writes the outputs
    // below `outputs` of its item.
    unsafe {
        project::launch_unchecked(
            &client,
            exact_cube_count(&client, items.count * items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type,
            input.into_tensor_arg(),
            weight.clone().into_tensor_arg(),
            through.map(CubeTensor::into_tensor_arg).into(),
            experts.map(CubeTensor::into_tensor_arg).into(),
            shares.map(CubeTensor::into_tensor_arg).into(),
            factor.map(CubeTensor::into_tensor_arg).into(),
            output.clone().into_tensor_arg(),
            factor_place,
            items.place(plan, vectors),
            (items.inner() * vectors) as u32,
            (stride(&weight) / vector) as u32,
            (through_stride / vector) as u32,
            items.outputs as u32,
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

/// Enough units to keep the memory busy, and enough weights for each read of the input. `vectors` are those of one expert, or of the only
/// matrix.
pub(super) fn plan(
    client: &Client,
    items: Items,
    vectors: usize,
    gated: bool,
    in_flight: usize,
) -> ProjectPlan {
    let (rows, outputs) = (items.rows, items.outputs * items.count);
    let vectors = vectors * items.inner();
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
    ProjectPlan {
        rows,
        outputs: of_team,
        gated,
        team: Team { units, width },
        teams: (cube / units).max(1),
        ranks: items.ranks,
        unroll: unroll.unwrap_or(1),
    }
}
