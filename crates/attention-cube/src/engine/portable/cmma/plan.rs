//! The plan of the cmma engine. The plan first chooses a fragment shape that the device supports. It then chooses tiles
//! from tables, by the output's width and the device's shared memory.
//!
//! A cube keeps one tile: rows of the *stationary* operands (Q and dO for a tile of queries, K and V for a tile of
//! keys). The cube streams blocks of rows of the *streamed* operands (K and V for a tile of queries, Q and dO for a
//! tile of keys). The *first* GEMMs multiply a stationary and a streamed operand to compute S (the scores) and dP (the
//! gradient of the probabilities). The *second* GEMMs compute the output or the gradients.

mod tables;

use self::tables::{
    DECODE, DOUBLE, HELD_FORWARD, HELD_KEY_VALUE, RESIDENT_FORWARD, RESIDENT_KEY_VALUE,
    RESIDENT_QUERY, SINGLE, Shape,
};
use crate::engine::bias_gradient::plan::BiasGradientPlan;
use crate::engine::portable::common::plan::{
    PortableBackwardPlan, PortableForwardPlan, backward_by, check, forward_by,
};
use crate::engine::table_gradient::plan::TableGradientPlan;
use crate::engine::tiling::check_sizes;
use crate::problem::AttentionProblem;
use crate::tile_ops::fragment_tiles::FragmentTiles;
use crate::tile_ops::tiles::{Products, UnitTiles};
use crate::types::device::{DeviceProfile, Fragments};
use crate::types::refusal::{Feature, Refusal};
use crate::types::request::{Layouts, Pass};
use burn::tensor::DType;

/// The fragment shapes `[m, n, k]` that the tile tables support, in order of preference.
const SHAPES: [[usize; 3]; 3] = [[16, 16, 16], [16, 8, 16], [8, 8, 8]];

/// The plane sizes (units per plane) that the tile tables support.
const PLANES: [usize; 2] = [32, 64];

/// The operands that stay in shared memory while the kernel streams blocks.
#[derive(Clone, Copy)]
struct Kept {
    /// The number of stationary operands that stay in shared memory.
    held: usize,
    /// The second GEMMs compute the output or the gradients. Their left operands are P (the probabilities), dS (the
    /// gradient of the scores), or both. This field is the number of left operands with their own region of shared
    /// memory. If the number is not 0, each of the two streamed operands also has its own region. If the number is 0,
    /// left operands and streamed operands overwrite each other in one region.
    resident: usize,
}

/// No operand stays in shared memory: each operand overwrites the previous one.
const NOTHING: Kept = Kept {
    held: 0,
    resident: 0,
};

/// The device and the sizes that the plan uses to choose tiles.
#[derive(Clone, Copy)]
struct Choice<'a> {
    device: &'a DeviceProfile,
    fragments: Fragments,
    /// The number of units per plane.
    plane: usize,
    /// The number of columns in the widest operand of the GEMMs that compute S and dP.
    depth: usize,
    /// The number of stationary operands in the GEMMs that compute S and dP.
    stationary: usize,
    /// The number of elements per load from global memory.
    vector: usize,
}

/// Collects the device and the sizes that the plan uses to choose tiles. Returns a refusal if the engine does not support
/// the problem.
fn choice<'a>(
    problem: &AttentionProblem,
    device: &'a DeviceProfile,
    layouts: Layouts,
    pass: Pass,
) -> Result<Choice<'a>, Refusal> {
    let dtype = problem.dtype;
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Err(Refusal::NotHalf(dtype));
    }
    check(problem, device, pass)?;
    check_sizes(problem)?;
    let support = &device.fragments;
    // Try fragments of the problem's dtype first, then f32 fragments. The conversion from half precision to f32 is exact.
    let wanted = [dtype, DType::F32];
    let wanted = wanted
        .iter()
        .flat_map(|dtype| SHAPES.map(|shape| (*dtype, shape)));
    let kind = |(dtype, shape)| {
        let is_wanted =
            |kind: &&Fragments| kind.dtype == dtype && [kind.m, kind.n, kind.k] == shape;
        support.kinds.iter().find(is_wanted)
    };
    let fragments = wanted.into_iter().find_map(kind);
    let fragments = *fragments.ok_or(Refusal::MissingFeature(Feature::Fragments(dtype)))?;
    if problem.quantized.is_some() && fragments.dtype == DType::F16 {
        return Err(Refusal::Quantized(
            "a probability times its value's scale may be too large or too small for F16",
        ));
    }
    if let Some(fault) = support.fault {
        return Err(Refusal::Fault(fault.into()));
    }
    let (least, most) = support.plane_sizes;
    if least != most || !PLANES.contains(&least) {
        return Err(Refusal::PlaneSizes { least, most });
    }
    let (depth, stationary) = match pass {
        Pass::Forward => (problem.head_dim, 1),
        Pass::Backward => (problem.head_dim.max(problem.value_dim), 2),
    };
    Ok(Choice {
        device,
        fragments,
        plane: least,
        depth,
        stationary,
        vector: layouts.vector(problem),
    })
}

impl Choice<'_> {
    /// Returns the tiles of the first entry in the table that fits the device's limits. The entry must also serve an
    /// output of `width` columns, and have at least `min_rows` rows.
    fn tiles(&self, table: &[Shape], width: usize, min_rows: usize) -> Result<UnitTiles, Refusal> {
        table
            .iter()
            .filter(|shape| width <= shape.width && min_rows <= shape.rows)
            .find_map(|shape| {
                let copied = self
                    .complete(shape, width, NOTHING)
                    .filter(|tiles| self.fit(tiles))?;
                let held = self.complete(shape, width, self.all_resident());
                // Keep the stationary operands in shared memory only if there is enough room left for the streamed
                // operand of the second GEMM (such as V in P V). With less room, the kernel would copy the streamed
                // operand in more pieces, and each piece costs a barrier.
                let is_as_good = |held: &UnitTiles| {
                    self.fit(held) && held.accumulated_parts() == copied.accumulated_parts()
                };
                Some(held.filter(is_as_good).unwrap_or(copied))
            })
            .ok_or(Refusal::Tiles {
                width,
                shared_memory: self.device.shared_memory,
                units: self.device.units_per_cube,
            })
    }

    /// Returns the setting that keeps all stationary operands in shared memory. With this setting, the streamed
    /// operands overwrite each other.
    fn all_resident(&self) -> Kept {
        Kept {
            held: self.stationary,
            ..NOTHING
        }
    }

    /// Tries the entries of both tables in order, and returns the first tiles that have `width` columns and fit the
    /// device. The stationary operands stay in shared memory.
    ///
    /// With tiles of the first table, both streamed operands also stay in shared memory, and so do the left operands of
    /// the second GEMMs (P or dS). `left` is the number of these left operands. With tiles of the second table, the
    /// streamed operands, P and dS overwrite each other.
    fn keeping(&self, left: usize, tables: [&[Shape]; 2], width: usize) -> Option<UnitTiles> {
        let all = Kept {
            resident: left,
            ..self.all_resident()
        };
        let [resident, held] =
            tables.map(|table| table.iter().filter(|shape| width <= shape.width));
        resident
            .filter_map(|shape| self.complete(shape, width, all))
            .chain(held.filter_map(|shape| self.complete(shape, width, self.all_resident())))
            .find(|tiles| self.fit(tiles))
    }

    /// True if the device has enough shared memory and enough units per cube for the tiles.
    fn fit(&self, tiles: &UnitTiles) -> bool {
        tiles.shared_memory() <= self.device.shared_memory
            && tiles.units <= self.device.units_per_cube
    }

    /// Computes the tiles of a table entry. Returns `None` if the planes cannot divide the entry's fragments evenly.
    ///
    /// Each operand in `kept` has its own region of shared memory. All other operands share one region. The shared
    /// region has room for the operands of the first GEMM (such as Q Kᵀ). The kernel copies the streamed rows of the
    /// second GEMM (such as V in P V) to the shared region piece by piece.
    fn complete(&self, shape: &Shape, width: usize, kept: Kept) -> Option<UnitTiles> {
        let Fragments { m, n, k, .. } = self.fragments;
        let Shape {
            units,
            rows,
            columns,
            depth,
            ..
        } = *shape;
        let Kept { held, resident } = kept;
        let planes = units / self.plane;
        let above = rows / m;
        // The streamed operand of the second GEMM (such as V in P V) may be wider than the operands of the first GEMM.
        // Take the larger width.
        let all_columns = self.depth.max(width);
        // Refuse cubes of a single plane, because of a bug in Metal's compiler:
        // <https://github.com/tracel-ai/cubecl/issues/1636>.
        let divides = rows.is_multiple_of(m)
            && columns.is_multiple_of(n)
            && columns.is_multiple_of(k)
            && planes > 1
            && units.is_multiple_of(self.plane)
            && (above.is_multiple_of(planes) || planes.is_multiple_of(above))
            && (held == 0 || self.depth <= depth)
            && (resident == 0 || all_columns <= depth);
        if !divides {
            return None;
        }
        let across = planes / above.min(planes);
        let output_fragments = width.div_ceil(n).div_ceil(across);
        let columns_at_once = match resident {
            0 => self.depth,
            _ => all_columns,
        };
        let depth = depth.min(columns_at_once.next_power_of_two()).max(k);
        if resident > 0 && across * n * output_fragments > depth {
            return None;
        }
        // `own_scores` is true if each unit can read its scores from fragments of its own plane. For this, the planes
        // must divide the fragments of S evenly, and the units of a plane must divide the vectors of a fragment evenly.
        let own_scores =
            (columns / n).is_multiple_of(across) && (m * n / 4).is_multiple_of(self.plane);
        let column_units = match own_scores {
            true => across * n / 4,
            false => columns / 4,
        };
        let with_staged = |staged_fragments| {
            Products::Fragments(FragmentTiles {
                fragments: self.fragments,
                plane: self.plane,
                output_fragments,
                staged_fragments,
                held,
                resident,
            })
        };
        let mut tiles = UnitTiles {
            units,
            rows,
            column_units,
            column_vectors: columns / 4 / column_units,
            depth,
            products: with_staged(1),
            output_units: 1,
            output_vectors: 1,
            staged_vectors: 1,
            streamed_rows: k,
            vector: self.vector,
        };
        if resident > 0 {
            tiles.products = with_staged(output_fragments);
            tiles.streamed_rows = columns;
            return Some(tiles);
        }
        let room = tiles.accumulated_vectors();
        for staged in
            (1..=output_fragments).filter(|staged| output_fragments.is_multiple_of(*staged))
        {
            let wider = UnitTiles {
                products: with_staged(staged),
                ..tiles
            };
            if wider.streamed_rows * wider.staged_pitch() <= room {
                tiles = wider;
            }
        }
        while columns.is_multiple_of(2 * tiles.streamed_rows)
            && 2 * tiles.streamed_rows * tiles.staged_pitch() <= room
        {
            tiles.streamed_rows *= 2;
        }
        Some(tiles)
    }
}

/// Plans the forward of `problem`, or returns the reason for a refusal.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<PortableForwardPlan, Refusal> {
    let choice = choice(problem, device, layouts, Pass::Forward)?;
    let width = problem.value_dim;
    forward_by(
        problem,
        device,
        |rows| choice.tiles(DECODE, width, rows),
        || {
            let kept = choice.keeping(1, [RESIDENT_FORWARD, HELD_FORWARD], width);
            kept.map_or_else(|| choice.tiles(SINGLE, width, 0), Ok)
        },
    )
}

/// Plans the backward of `problem`, or returns the reason for a refusal.
pub(super) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<PortableBackwardPlan, Refusal> {
    let choice = choice(problem, device, layouts, Pass::Backward)?;
    let width = problem.head_dim.max(problem.value_dim);
    let query = choice.keeping(1, [RESIDENT_QUERY, &[]], problem.head_dim);
    let key_value = choice.keeping(2, [RESIDENT_KEY_VALUE, HELD_KEY_VALUE], width);
    let plan = PortableBackwardPlan {
        query: query.map_or_else(|| choice.tiles(SINGLE, problem.head_dim, 0), Ok)?,
        key_value: key_value.map_or_else(|| choice.tiles(DOUBLE, width, 0), Ok)?,
        parts: None,
        bias: BiasGradientPlan::new(problem, device, choice.vector)?,
        table: TableGradientPlan::new(problem, device, choice.vector)?,
    };
    backward_by(problem, device, plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::MAX_HEAD_DIM;
    use crate::testing::card;

    /// Checks that planes and units divide the tiles of each table entry evenly. For each entry, at least one fragment shape
    /// and plane size must give tiles.
    #[test]
    fn complete_every_table_row_divides_evenly() {
        let device = card(16 << 10);
        let tables = [
            RESIDENT_FORWARD,
            RESIDENT_QUERY,
            RESIDENT_KEY_VALUE,
            HELD_FORWARD,
            HELD_KEY_VALUE,
            SINGLE,
            DOUBLE,
            DECODE,
        ];
        for shape in tables.into_iter().flatten() {
            let mut is_of_use = false;
            for ([m, n, k], plane) in SHAPES
                .into_iter()
                .flat_map(|shape| PLANES.map(|plane| (shape, plane)))
            {
                let kept = [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)];
                for (dtype, (held, resident)) in [DType::F16, DType::F32]
                    .into_iter()
                    .flat_map(|dtype| kept.map(|kept| (dtype, kept)))
                {
                    for width in [8, 33, 64, 100, 128, 250, 512, MAX_HEAD_DIM] {
                        let choice = Choice {
                            device: &device,
                            fragments: Fragments {
                                m,
                                n,
                                k,
                                dtype,
                                emulation: None,
                            },
                            plane,
                            depth: width,
                            stationary: 2,
                            vector: 4,
                        };
                        let tiles = choice.complete(shape, width, Kept { held, resident });
                        let Some(tiles) = tiles.filter(|_| width <= shape.width) else {
                            continue;
                        };
                        is_of_use = true;
                        let context = format!("{tiles:?}");
                        // The first assertion checks that the tile has room for all columns of an operand that stays in
                        // shared memory. The loop below checks that every operand starts at a multiple of the alignment
                        // that fragment loads require.
                        assert!(held == 0 || tiles.depth >= width, "{context}");
                        let vector_bytes = if dtype == DType::F32 { 16 } else { 8 };
                        for at in [
                            tiles.stationary_vectors(),
                            tiles.streamed_at(),
                            tiles.accumulated_at(),
                            tiles.resident_at(1),
                            tiles.left_tile_at(1),
                        ] {
                            assert!((at * vector_bytes).is_multiple_of(32), "{context}");
                        }
                        let fragments = tiles.fragment_tiles();
                        assert!(tiles.planes() > 1, "{context}");
                        assert_eq!(
                            tiles.plane_rows() * tiles.plane_columns(),
                            tiles.planes(),
                            "{context}"
                        );
                        assert_eq!(
                            tiles.plane_rows() * tiles.row_fragments() * m,
                            tiles.rows,
                            "{context}"
                        );
                        let across = tiles.plane_columns() * n;
                        assert!(across * fragments.output_fragments >= width, "{context}");
                        assert_eq!(tiles.columns(), shape.columns, "{context}");
                        assert!(
                            resident == 0 || across * fragments.output_fragments <= tiles.depth,
                            "{context}"
                        );
                        assert!(
                            across * tiles.score_fragments() >= tiles.columns(),
                            "{context}"
                        );
                        assert!(
                            fragments
                                .output_fragments
                                .is_multiple_of(fragments.staged_fragments),
                            "{context}"
                        );
                        assert!(
                            tiles.columns().is_multiple_of(tiles.streamed_rows),
                            "{context}"
                        );
                        assert!(tiles.streamed_rows.is_multiple_of(k), "{context}");
                        assert!(tiles.depth.is_multiple_of(k), "{context}");
                        assert_eq!(
                            tiles.rows_per_unit() * tiles.row_units(),
                            tiles.rows,
                            "{context}"
                        );
                        assert_eq!(
                            tiles.group_rows() * tiles.row_groups(),
                            tiles.rows,
                            "{context}"
                        );
                        // The softmax gives each row of the tile to one unit, so there must be at least as many units as
                        // rows.
                        assert!(tiles.rows <= tiles.units, "{context}");
                        // A fragment that is 16 elements wide starts at a multiple of 32 bytes, and a narrower fragment
                        // at a multiple of 16 bytes. For this, each row must start at a multiple of 16 bytes.
                        for pitch in [
                            tiles.depth_pitch(),
                            tiles.tile_pitch(),
                            tiles.staged_pitch(),
                        ] {
                            let bytes = 4 * pitch * if dtype == DType::F32 { 4 } else { 2 };
                            assert!(bytes.is_multiple_of(16), "{context}");
                        }
                    }
                }
            }
            assert!(is_of_use, "{} {} {}", shape.width, shape.units, shape.rows);
        }
    }
}
