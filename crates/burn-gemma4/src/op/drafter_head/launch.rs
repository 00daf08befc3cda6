//! Launches the kernels of a drafter's step.

use super::{
    GroupOptions, GuessBackend, JoinOptions, NUMBERS,
    groups::{
        AT_ONCE, CHOOSING_UNITS, CandidatesLaunch, CandidatesPlan, OWN, argmax_candidates_pdl,
        choose_groups_pdl,
    },
    kernel::{JoinedLaunch, UNITS, join_pdl, place_guess_pdl},
};
use crate::op::{
    argmax,
    launch::{plane_width, rows_of, vector_size},
    sums::Team,
};
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty, exact_cube_count};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

/// The number of units in a cube that searches the candidate tokens. If a plane has more units than this number, a cube
/// consists of one plane.
const CANDIDATE_UNITS: usize = 256;

impl GuessBackend for CubeBackend {
    fn join_streams(
        table: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        streams: FloatTensor<Self>,
        options: JoinOptions,
    ) -> FloatTensor<Self> {
        join(table, tokens, streams, options)
    }

    fn choose_groups(scores: FloatTensor<Self>, options: GroupOptions) -> IntTensor<Self> {
        choose(scores, options)
    }

    fn guess_of_groups(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        ordering: IntTensor<Self>,
        chosen: IntTensor<Self>,
        guesses: IntTensor<Self>,
        first: usize,
    ) -> IntTensor<Self> {
        let candidates = argmax_candidates(hidden, table, ordering, chosen);
        place(candidates, guesses, first)
    }

    fn guess_of_logits(
        logits: FloatTensor<Self>,
        guesses: IntTensor<Self>,
        first: usize,
    ) -> IntTensor<Self> {
        place(argmax::launch::of_stretches(logits), guesses, first)
    }
}

fn join(
    table: CubeTensor,
    tokens: CubeTensor,
    streams: CubeTensor,
    options: JoinOptions,
) -> CubeTensor {
    let client = table.client.clone();
    let (table, streams) = (rows_of(table), rows_of(streams));
    let [rows, columns] = [streams.meta.shape()[0], table.meta.shape()[1]];
    assert!(
        options.first + rows <= tokens.meta.shape().num_elements(),
        "tokens: expected one token for each row"
    );
    assert_eq!(
        table.dtype, streams.dtype,
        "operands: expected the same dtype"
    );
    let output = empty(&table, [rows, 2 * columns], table.dtype);
    let stride = |tensor: &CubeTensor| tensor.meta.strides()[0];
    let vector = vector_size(
        &client,
        table.dtype.size(),
        &[columns, stride(&table), stride(&streams)],
    );
    let all = rows * 2 * columns / vector;
    let joined = JoinedLaunch::new(
        options.first as u32,
        (stride(&table) / vector) as u32,
        (stride(&streams) / vector) as u32,
        (columns / vector) as u32,
        all as u32,
    );
    let element = dtype_to_storage_type(table.dtype);
    let integer = dtype_to_storage_type(tokens.dtype);
    // SAFETY: unit `i` writes vector `i` of `output` only if `i` is below `all`, the length of `output`. The unit reads one
    // vector of a row of `streams` or of `table`. Token ids are below the number of rows in `table`.
    unsafe {
        join_pdl::launch_unchecked(
            &client,
            cube_count(&client, all.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type([&table, &output]),
            table.into_tensor_arg(),
            into_contiguous(tokens).into_tensor_arg(),
            streams.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            joined,
            options.scale.unwrap_or(1.0) as f32,
            options.scale.is_some(),
            supports_pdl(&client),
            element,
            integer,
            vector,
        );
    }
    output
}

fn choose(scores: CubeTensor, options: GroupOptions) -> CubeTensor {
    let client = scores.client.clone();
    let scores = rows_of(scores);
    let [rows, columns] = [scores.meta.shape()[0], scores.meta.shape()[1]];
    let GroupOptions {
        start,
        count,
        top_k,
    } = options;
    assert!(
        start + count <= columns,
        "scores: the range of columns exceeds the row"
    );
    let chosen = empty(&scores, [rows, top_k], NUMBERS);
    let cubes_of_row = count.div_ceil(OWN);
    let stride = scores.meta.strides()[0];
    let element = dtype_to_storage_type(scores.dtype);
    // SAFETY: each cube reads the `count` scores of one of the `rows` rows, and writes only elements below `top_k` of
    // that row in `chosen`.
    unsafe {
        choose_groups_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows * cubes_of_row),
            CubeDim::new_1d(CHOOSING_UNITS as u32),
            scores.into_tensor_arg(),
            chosen.clone().into_tensor_arg(),
            start as u32,
            stride as u32,
            count as u32,
            top_k as u32,
            cubes_of_row as u32,
            supports_pdl(&client),
            element,
            dtype_to_storage_type(NUMBERS),
        );
    }
    chosen
}

/// Divides the candidate tokens of each row among `parts` cubes. Returns the largest logit that each cube finds, and the
/// token of this logit. Both tensors are `[rows, parts]`.
fn argmax_candidates(
    hidden: CubeTensor,
    table: CubeTensor,
    ordering: CubeTensor,
    chosen: CubeTensor,
) -> [CubeTensor; 2] {
    let client = hidden.client.clone();
    let (hidden, table) = (into_contiguous(hidden), rows_of(table));
    let [rows, columns] = [hidden.meta.shape()[0], hidden.meta.shape()[1]];
    assert_eq!(
        table.meta.shape()[1],
        columns,
        "table: expected as many columns as `hidden`"
    );
    assert_eq!(
        table.dtype, hidden.dtype,
        "operands: expected the same dtype"
    );
    let (of_group, groups) = (ordering.meta.shape()[1], chosen.meta.shape()[1]);
    assert_eq!(
        chosen.meta.shape()[0],
        rows,
        "chosen: expected groups for each row"
    );
    let stride = table.meta.strides()[0];
    let vector = vector_size(&client, hidden.dtype.size(), &[columns, stride]);
    let width = plane_width(&client);
    let team = Team {
        units: width,
        width,
    };
    let units = CANDIDATE_UNITS.max(width);
    let teams = units / width;
    let plan = CandidatesPlan {
        team,
        teams,
        pdl: supports_pdl(&client),
    };
    let parts = (of_group * groups).div_ceil(teams * AT_ONCE);
    let largest = empty(&hidden, [rows, parts], DType::F32);
    let tokens = empty(&hidden, [rows, parts], NUMBERS);
    let candidates = CandidatesLaunch::new(
        of_group as u32,
        groups as u32,
        (columns / vector) as u32,
        (stride / vector) as u32,
        parts as u32,
    );
    let element = dtype_to_storage_type(hidden.dtype);
    // SAFETY: each unit reads only weight rows of tokens in chosen groups. The indices of chosen groups are below the number
    // of groups. Each cube writes only its own element of `largest` and of `tokens`.
    unsafe {
        argmax_candidates_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows * parts),
            CubeDim::new_1d(units as u32),
            address_type([&table, &hidden]),
            hidden.into_tensor_arg(),
            table.into_tensor_arg(),
            into_contiguous(ordering).into_tensor_arg(),
            into_contiguous(chosen).into_tensor_arg(),
            largest.clone().into_tensor_arg(),
            tokens.clone().into_tensor_arg(),
            candidates,
            plan,
            [element, dtype_to_storage_type(NUMBERS)],
            vector,
        );
    }
    [largest, tokens]
}

/// Chooses each row's largest logit among the results of `argmax_candidates`. Writes the token of this logit to the
/// row's position in `guesses`, the tensor of draft tokens.
fn place([largest, tokens]: [CubeTensor; 2], guesses: CubeTensor, first: usize) -> CubeTensor {
    let client = largest.client.clone();
    let [rows, parts] = [largest.meta.shape()[0], largest.meta.shape()[1]];
    assert!(
        first + rows <= guesses.meta.shape().num_elements(),
        "guesses: expected a position for each row"
    );
    assert_eq!(
        guesses.dtype, tokens.dtype,
        "operands: expected the same dtype"
    );
    // SAFETY: cube `r` of `rows` reads row `r` of `largest` and `tokens`, which has `parts` elements. Cube `r` writes
    // element `first + r` of `guesses`, which is within the tensor by the assertion above.
    unsafe {
        place_guess_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows),
            CubeDim::new_1d(UNITS as u32),
            largest.into_tensor_arg(),
            tokens.into_tensor_arg(),
            guesses.clone().into_tensor_arg(),
            first as u32,
            parts as u32,
            supports_pdl(&client),
            dtype_to_storage_type(NUMBERS),
        );
    }
    guesses
}
