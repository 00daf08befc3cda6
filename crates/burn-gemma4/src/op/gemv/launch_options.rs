//! Options of a GEMV launch, and the division of the launch's work among units.

use super::{
    GEMV_MAX_ROWS, MaybeMatrix, Origin, ProductOptions, ProductTensors,
    experts::{ExpertInputsLaunch, ItemPlaceLaunch, Items, OfExperts},
    sums::{Epilogue, EpilogueInputsLaunch, FactorPlaceLaunch, ProjectPlan},
};
use crate::op::{
    launch::{plane_width, rows_of},
    sums::Team,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::pdl::supports_pdl;
use cubecl::{client::Client, prelude::Float};

/// The optional tensors of a GEMV, and its epilogue.
pub(super) struct LaunchOptions {
    pub gelu: bool,
    /// True for GeGLU: the kernel multiplies the output of `second` by the GELU of the first matrix's output. If false,
    /// the kernel concatenates the outputs.
    pub gated: bool,
    pub second: Option<CubeTensor>,
    pub third: Option<CubeTensor>,
    /// A tensor that multiplies the output element by element, and the column of this tensor that multiplies the first
    /// output column.
    pub factor: Option<(CubeTensor, usize)>,
    pub cap: Option<f64>,
    pub origin: Origin,
    /// The chosen experts, if the weights hold the matrices of several experts.
    pub experts: Option<OfExperts>,
}

/// The shape of a GEMV, from which the tensor-core kernels make their plans.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// The number of input rows.
    pub rows: usize,
    /// The number of outputs per input row: the rows of the matrix, or of all concatenated matrices.
    pub outputs: usize,
    /// The number of input columns, which is the inner dimension.
    pub columns: usize,
    /// True for GeGLU, which multiplies by two matrices.
    pub gated: bool,
    /// The number of concatenated matrices.
    pub sides: usize,
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

    /// True if no launch writes a matrix of this GEMV. `first` is the first matrix. Returns false if the rows of a
    /// matrix are not contiguous, because a launch would first copy the matrix.
    pub fn reads_parameters(&self, first: &CubeTensor) -> bool {
        let matrices = [Some(first), self.second.as_ref(), self.third.as_ref()];
        let stays = |matrix: &CubeTensor| {
            !matrix.meta.is_tiled() && matrix.meta.strides().last() == Some(&1)
        };
        self.origin == Origin::Parameters && matrices.into_iter().flatten().all(stays)
    }

    pub(super) fn gated_by_experts(weight: CubeTensor, chosen: CubeTensor, rows: usize) -> Self {
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

    pub(super) fn mixed(chosen: CubeTensor, shares: CubeTensor, rows: usize) -> Self {
        Self {
            experts: Some(OfExperts {
                chosen: into_contiguous(chosen),
                shares: Some(into_contiguous(shares)),
                rows,
            }),
            ..Self::default()
        }
    }

    /// Divides a GEMV of `rows` input rows into work items: see the module `experts`. `of_matrix` is the number of rows
    /// in the first matrix.
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

    /// Returns the shape of the GEMV of `input` by `first` and the other matrices of these options.
    #[cfg(feature = "cuda")]
    pub fn shape(&self, input: &CubeTensor, first: &CubeTensor) -> Shape {
        let [rows, columns] = [input.meta.shape()[0], input.meta.shape()[1]];
        Shape {
            rows,
            outputs: self.items(rows, first.meta.shape()[0]).outputs(),
            columns,
            gated: self.gated,
            sides: self.sides(),
        }
    }

    /// The number of concatenated matrices.
    pub fn sides(&self) -> usize {
        match self.gated {
            true => 1,
            false => 1 + self.second.iter().chain(&self.third).count(),
        }
    }

    /// Takes the chosen experts and the router's weights out of the options, and returns them as a kernel argument.
    pub fn expert_inputs(&mut self, place: ItemPlaceLaunch) -> ExpertInputsLaunch {
        let [chosen, shares] = match self.experts.take() {
            Some(experts) => [Some(experts.chosen), experts.shares],
            None => [None, None],
        }
        .map(|tensor| tensor.map(CubeTensor::into_tensor_arg));
        ExpertInputsLaunch::new(chosen.into(), shares.into(), place)
    }

    /// Takes the factor of the output out of the options. Returns the factor tensor. Also returns its first used column
    /// and its row stride as a kernel argument.
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

    /// Returns the epilogue's inputs as a kernel argument. `factor` and `place` are the result of [`Self::factor`].
    pub fn epilogue_inputs<E: Float>(
        &self,
        factor: Option<CubeTensor>,
        place: FactorPlaceLaunch,
    ) -> EpilogueInputsLaunch<E> {
        let factor = factor.map(CubeTensor::into_tensor_arg);
        EpilogueInputsLaunch::new(factor.into(), place, self.cap.unwrap_or(1.0) as f32)
    }

    pub fn epilogue(&self) -> Epilogue {
        Epilogue {
            gelu: self.gelu,
            capped: self.cap.is_some(),
        }
    }
}

/// Plans how many units compute an output together, and for how many outputs a unit uses each loaded input. The plan
/// has enough units to saturate the memory bandwidth. `vectors` is the number of vectors in a row of a matrix.
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
        rows <= GEMV_MAX_ROWS,
        "rows: the kernel takes at most {GEMV_MAX_ROWS}, but got {rows}"
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
    // If the device has no plane operations, let only a few units compute an output together. Each unit then writes a
    // partial sum to shared memory, and every additional partial sum costs an addition.
    let (mut units, most_units) = if width == 1 { (8, 32) } else { (width, 256) };
    let teams_in_all = outputs.div_ceil(of_team);
    while units < most_units
        && are_filled(vectors, 2 * units)
        && teams_in_all * units < processors * 1024
    {
        units *= 2;
    }
    let cube = if width == 1 { 64 } else { 256.max(width) };
    let in_flight = in_flight / (of_team * if gated { 2 } else { 1 });
    let unroll = unroll(rows, vectors, units, in_flight.max(1));
    let teams = (cube / units).max(1);
    let pdl = supports_pdl(client);
    ProjectPlan {
        rows,
        outputs: of_team,
        gated,
        team: Team { units, width },
        teams,
        ranks: items.ranks,
        sides: options.sides(),
        unroll,
        is_padded: unroll > 1 && !vectors.is_multiple_of(unroll * units),
        pdl,
        reads_ahead: false,
    }
}

/// True if at most an eighth of the loads lie beyond the end of a row. Each of `units` units loads one vector at a
/// time.
pub(super) fn are_filled(vectors: usize, units: usize) -> bool {
    8 * vectors >= 7 * vectors.next_multiple_of(units)
}

/// Returns the number of vectors that a unit keeps in flight, at most `in_flight`.
///
/// A divisor of the number of a unit's vectors wastes no load. But a unit has 11 vectors of a row of 26B-A4B. It then
/// loads six at a time, and wastes one load of twelve. One vector at a time would leave most of the bandwidth unused.
fn unroll(rows: usize, vectors: usize, units: usize, in_flight: usize) -> usize {
    let steps = vectors.div_ceil(units).max(1);
    let exact = match vectors.is_multiple_of(units) {
        true => (1..=in_flight)
            .rev()
            .find(|unroll| steps.is_multiple_of(*unroll))
            .unwrap_or(1),
        false => 1,
    };
    let padded = steps.div_ceil(steps.div_ceil(in_flight));
    // Products of several rows are bound by arithmetic, and a vector beyond the end costs as much of it as others.
    let is_wasteful = rows > 1 && !are_filled(steps, padded);
    match 2 * exact > in_flight.min(steps) || is_wasteful {
        true => exact,
        false => padded,
    }
}

pub(super) fn tensor_of(matrix: &MaybeMatrix<CubeBackend>) -> Option<CubeTensor> {
    match matrix {
        MaybeMatrix::Absent => None,
        MaybeMatrix::Whole(matrix) | MaybeMatrix::Words(matrix) => Some(matrix.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks rows of published models on 32 units. 26B-A4B has 11 vectors a unit, or 5.5 of two words.
    #[test]
    fn unroll_of_published_rows_wastes_few_loads() {
        for (rows, vectors, in_flight, expected) in [
            (1, 96, 8, 3),
            (1, 352, 8, 6),
            (1, 176, 8, 6),
            (1, 160, 4, 3),
            (8, 160, 4, 1),
            (8, 352, 4, 4),
            (1, 768, 8, 8),
            (8, 96, 2, 1),
        ] {
            assert_eq!(
                unroll(rows, vectors, 32, in_flight),
                expected,
                "{rows} rows of {vectors} vectors"
            );
        }
    }

    #[test]
    fn are_filled_counts_loads_beyond_the_end() {
        assert!(are_filled(352, 32) && are_filled(176, 32) && are_filled(7, 8));
        assert!(!are_filled(132, 32) && !are_filled(6, 8));
    }
}
