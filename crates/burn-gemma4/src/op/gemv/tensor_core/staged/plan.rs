//! Divides the GEMMs of quantized weights among warps, for the kernels that stage their weights.

use super::super::super::launch_options::Shape;
use super::super::super::sums::ProjectPlan;
use super::super::super::{BATCH_MAX_ROWS, GEMV_MAX_ROWS};
use super::super::batch::TILE_ROWS;
use super::super::codes::STEP;
use super::super::plan::WARP;
use super::columns_of_stage;
use crate::op::sums::Team;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::gemv::PRODUCT_ROWS;

/// The parameters of a plan.
#[derive(Clone, Copy, Debug)]
struct Tuning {
    /// The largest number of input rows for which the tuning is used.
    last_rows: usize,
    /// The largest number of weight rows per team of warps.
    weights: usize,
    /// The largest number of fragments, 8 weight rows each, in a warp's ring.
    in_flight: usize,
    /// The target number of threads per multiprocessor. To reach the target, the plan divides the inner dimension among
    /// more warps.
    threads: usize,
    /// The target number of warps in a CTA. If a team has fewer warps, a CTA holds several teams.
    warps: usize,
    /// The largest number of warps in a team, which is then a CTA.
    most_warps: usize,
}

/// Returns the smallest number of input rows, for codes of `bits` bits. GEMVs with fewer rows run on CUDA cores. Decoding
/// of one sequence of E2B on an H200 (2026-11-30), in tokens/s: in Q4_0, 689 on tensor cores and 669 on CUDA cores; in
/// Q8_0, 558 on tensor cores and 576 on CUDA cores.
const fn first_rows(bits: usize) -> usize {
    match bits {
        4 => 1,
        _ => 2,
    }
}

/// The tunings for numbers of input rows in ascending order. More rows need more registers: up to 116 for 16 rows, and
/// more than 168 for 64 rows. CTAs of more than 8 warps would then spill.
///
/// Decoding of E2B in Q4_0 on an H200 (2026-11-30, 1,024 tokens of context), in tokens/s. The columns are numbers of
/// sequences, the rows the weights, fragments in flight, threads and warps.
///
/// | | 1 | 2 | 4 | 8 | 16 | 32 | 64 |
/// |---|---|---|---|---|---|---|---|
/// | 32, 4, 1,024, 8 | 689 | 1,324 | 2,489 | 5,182 | | | |
/// | 16, 4, 768, 8 | 659 | 1,297 | 2,465 | 5,284 | 7,964 | | |
/// | 16, 4, 1,024, 8 | 655 | 1,261 | | 5,222 | 7,841 | | |
/// | 32, 8, 768, 8 | | 1,261 | | 4,860 | | | |
/// | 32, 8, 512, 8 | | | | 5,011 | 8,153 | | |
/// | 16, 4, 512, 8 | | | | | 8,001 | 9,363 | 12,879 |
/// | 32, 4, 512, 8 | | | | | 7,762 | 10,055 | 13,246 |
/// | 32, 8, 384, 8 | | | | | | 10,165 | 13,336 |
/// | 16, 2, 1,024, 8 | | | | 4,825 | | | |
/// | 16, 4, 1,024, 4; 16 warps | | | | 5,151; 4,980 | | | |
const TUNINGS: [Tuning; 4] = [
    Tuning {
        last_rows: 4,
        weights: 32,
        in_flight: 4,
        threads: 1024,
        warps: 8,
        most_warps: 16,
    },
    Tuning {
        last_rows: GEMV_MAX_ROWS,
        weights: 16,
        in_flight: 4,
        threads: 768,
        warps: 8,
        most_warps: 16,
    },
    Tuning {
        last_rows: 16,
        weights: 32,
        in_flight: 8,
        threads: 512,
        warps: 8,
        most_warps: 16,
    },
    Tuning {
        last_rows: BATCH_MAX_ROWS,
        weights: 32,
        in_flight: 8,
        threads: 384,
        warps: 8,
        most_warps: 8,
    },
];

/// The tuning for up to 8 rows and codes of 8 bits. With 8 sequences of E2B in Q8_0, this tuning has 3,893 tokens/s,
/// and the tunings for 4 and 8 rows of 4 bits have 3,819 and 3,753.
const EIGHT_BITS: Tuning = Tuning {
    last_rows: GEMV_MAX_ROWS,
    weights: 32,
    in_flight: 8,
    threads: 768,
    warps: 8,
    most_warps: 16,
};

/// The tuning for MoE experts. The kernel multiplies up to 8 rows of an expert at once.
const EXPERTS: Tuning = Tuning {
    last_rows: GEMV_MAX_ROWS,
    weights: 32,
    in_flight: 8,
    threads: 768,
    warps: 4,
    most_warps: 16,
};

/// The largest number of f32 sums of a CTA in shared memory. They take 16 KB beside 72 KB of rings.
const MOST_SUMS: usize = 4096;

/// Returns the division of a GEMM with codes of `bits` bits among warps, or `None` if the kernel does not support the
/// shape.
pub(in super::super) fn plan(
    shape: Shape,
    bits: usize,
    multiprocessors: usize,
    pdl: bool,
) -> Option<ProjectPlan> {
    if shape.rows < first_rows(bits) {
        return None;
    }
    let tuning = match bits {
        8 if shape.rows <= EIGHT_BITS.last_rows => EIGHT_BITS,
        _ => TUNINGS
            .into_iter()
            .find(|tuning| shape.rows <= tuning.last_rows)?,
    };
    let plan = divided(1, shape, bits, tuning, multiprocessors, pdl)?;
    Some(ProjectPlan {
        reads_ahead: pdl,
        ..plan
    })
}

/// Returns the division of the GEMMs of `experts` MoE experts among warps: see [`plan`]. The shape is that of one
/// expert.
pub(in super::super) fn plan_of_experts(
    experts: usize,
    shape: Shape,
    bits: usize,
    multiprocessors: usize,
    pdl: bool,
) -> Option<ProjectPlan> {
    divided(experts, shape, bits, EXPERTS, multiprocessors, pdl)
}

/// Divides `gemms` GEMMs of the same shape among warps.
fn divided(
    gemms: usize,
    shape: Shape,
    bits: usize,
    tuning: Tuning,
    multiprocessors: usize,
    pdl: bool,
) -> Option<ProjectPlan> {
    if shape.outputs == 0 || shape.columns == 0 || !shape.columns.is_multiple_of(STEP) {
        return None;
    }
    let matrices = if shape.gated { 2 } else { 1 };
    let teams_of = |weights: usize| gemms * (shape.outputs * matrices).div_ceil(weights);
    // Several couples of fragments share the reads of the input. Use fewer if otherwise more than half of the
    // multiprocessors would be idle.
    let mut weights = tuning.weights;
    while weights > FRAGMENT_ROWS && 2 * teams_of(weights) < multiprocessors {
        weights /= 2;
    }
    let fragments = weights / PRODUCT_ROWS;
    let stages = shape.columns.div_ceil(columns_of_stage(bits));
    let sums = weights * shape.rows.min(TILE_ROWS);
    let most_warps = tuning.most_warps.min(MOST_SUMS / sums).min(stages);
    let all_teams = teams_of(weights);
    let warps = (multiprocessors * tuning.threads)
        .div_ceil(all_teams * WARP)
        .clamp(1, most_warps);
    // Use only as many warps as the largest number of stages per warp needs.
    let of_warp = stages.div_ceil(warps);
    let warps = stages.div_ceil(of_warp);
    // Let teams share a CTA only if there are several for each multiprocessor.
    let of_cta = (tuning.warps / warps).min(all_teams / multiprocessors);
    Some(ProjectPlan {
        rows: shape.rows,
        outputs: weights / matrices,
        gated: shape.gated,
        team: Team {
            units: warps * WARP,
            width: WARP,
        },
        teams: of_cta.max(1),
        ranks: 0,
        sides: shape.sides,
        unroll: of_warp.min(tuning.in_flight / fragments),
        is_padded: false,
        pdl,
        reads_ahead: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::gemv::tensor_core::codes::Codes;
    use crate::op::gemv::tensor_core::staged::Staging;
    use cube_kit::nvidia::Half;

    /// The shared memory of a CTA on consumer cards of Ampere and Ada, in bytes.
    const SHARED_MEMORY: usize = 99 << 10;

    fn of(
        [rows, outputs, columns]: [usize; 3],
        gated: bool,
        bits: usize,
        multiprocessors: usize,
    ) -> ProjectPlan {
        let shape = Shape {
            rows,
            outputs,
            columns,
            gated,
            sides: 1,
        };
        plan(shape, bits, multiprocessors, true).expect("the columns are whole steps")
    }

    /// Checks that the rings and the sums fit into shared memory, and that every warp has a stage. The numbers of
    /// multiprocessors are those of small and large cards, and of the emulator.
    #[test]
    fn plans_fit_into_shared_memory() {
        let outputs = [1, 20, 700, 1536, 2560, 2816, 3840, 6144, 262_144];
        for columns in (64..=24_576).step_by(320) {
            for (outputs, gated) in outputs.into_iter().flat_map(|x| [(x, false), (x, true)]) {
                for rows in [1, 2, 4, 5, 8, 9, 14, 16, 17, 33, 64] {
                    for (bits, multiprocessors) in [4, 8].into_iter().flat_map(|bits| {
                        [4, 28, 46, 82, 128, 132, 170].map(|processors| (bits, processors))
                    }) {
                        if rows < first_rows(bits) {
                            continue;
                        }
                        let plan = of([rows, outputs, columns], gated, bits, multiprocessors);
                        let stages = columns.div_ceil(columns_of_stage(bits));
                        assert!(plan.team.parts() <= stages, "{plan:?}");
                        assert!(plan.unroll >= 1 && plan.fragments() >= 2, "{plan:?}");
                        let most_units = if rows > 16 { 256 } else { 512 };
                        assert!(plan.teams * plan.team.units <= most_units, "{plan:?}");
                        let codes = Codes {
                            bits,
                            half: Half::Bf16,
                        };
                        let bytes = Staging::new(codes, columns).shared_memory(plan);
                        assert!(bytes <= SHARED_MEMORY, "{bytes}: {plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn plan_divides_long_rows_among_warps() {
        // The GEMMs of E2B with 8 rows: the down projection, the gate and up projections, and the LM head.
        for (outputs, columns, gated, expected) in [
            (1536, 12_288, false, (16, 16, 2)),
            (12_288, 1536, true, (8, 3, 2)),
            (262_144, 1536, false, (16, 1, 2)),
        ] {
            let plan = of([8, outputs, columns], gated, 4, 132);
            let found = (plan.outputs, plan.team.parts(), plan.unroll);
            assert_eq!(found, expected, "{plan:?}");
        }
    }

    #[test]
    fn plan_of_unsupported_shapes_gives_none() {
        let shape = |rows, columns| Shape {
            rows,
            outputs: 64,
            columns,
            gated: false,
            sides: 1,
        };
        for (rows, columns, bits) in [(1, 1536, 8), (65, 1536, 4), (8, 96, 4), (8, 0, 4)] {
            assert!(plan(shape(rows, columns), bits, 132, true).is_none());
        }
    }
}
