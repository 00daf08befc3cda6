//! Tests of the gradients of tables that score mods read. The reference differentiates the score mod's code in f64. A
//! second reference expresses the score mod as a bias, which Burn differentiates.

use crate::code::Bent;
use crate::dense::read;
use crate::devices::devices;
use attention_cube::score_mod::{
    Alibi, DistanceBias, LearnedScoreMod, ScoreMod, ScorePlace, ScoreTable,
};
use attention_cube::shards::{self, Merged};
use attention_cube::{AttentionOptions, BlockMask, attention_with_lse, fused_attention, reference};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Adds `table[head] · ln(1 + distance)` to each score. For later keys, which a causal mask hides, the logarithm is NaN
/// or infinite.
struct LogDistance;

#[cfg_attr(feature = "cube", cube)]
impl ScoreMod for LogDistance {
    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        score + table.at(place.head) * (1.0f32 + place.distance_f32()).ln()
    }

    fn derivative(_score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        1.0f32
    }
}

#[cfg_attr(feature = "cube", cube)]
impl LearnedScoreMod for LogDistance {
    const OF_DISTANCE: bool = true;

    fn element(place: ScorePlace, _table: &ScoreTable) -> u32 {
        place.head
    }

    fn element_derivative(_score: f32, place: ScorePlace, _table: &ScoreTable) -> f32 {
        (1.0f32 + place.distance_f32()).ln()
    }
}

const BATCH: usize = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const Q_LEN: usize = 50;
const KV_LEN: usize = 70;
const WIDTH: usize = 16;

/// The operands of a call on the CPU: query, keys, values, and the output's weights in the loss.
struct Operands([Tensor<4>; 4]);

impl Operands {
    fn random() -> Self {
        Self::of([Q_LEN, KV_LEN, WIDTH])
    }

    /// Creates random operands with the given numbers of queries, keys and columns.
    fn of([q_len, kv_len, width]: [usize; 3]) -> Self {
        let random = |heads, length| {
            let shape = [BATCH, heads, length, width];
            Tensor::<4>::random(
                shape,
                Distribution::Normal(0.0, 1.0),
                (&Device::flex(), DType::F32),
            )
        };
        Self([
            random(Q_HEADS, q_len),
            random(KV_HEADS, kv_len),
            random(KV_HEADS, kv_len),
            random(Q_HEADS, q_len),
        ])
    }

    fn on(&self, device: &Device, dtype: DType) -> [Tensor<4>; 4] {
        self.0.each_ref().map(|rows| {
            let data = rows.clone().into_data().convert_dtype(dtype);
            Tensor::from_data(data, (device, dtype))
        })
    }

    /// Returns the gradient of the table that `options` gets.
    fn table_gradient(
        &self,
        device: &Device,
        dtype: DType,
        table: &[f32],
        options: &dyn Fn(Tensor<1>, &Device) -> AttentionOptions,
        is_reference: bool,
    ) -> Vec<f64> {
        let device = &device.clone().autodiff();
        let [query, key, value, weights] = self.on(device, dtype);
        let table = TensorData::new(table.to_vec(), [table.len()]);
        let table = Tensor::<1>::from_data(table, (device, DType::F32)).require_grad();
        let options = options(table.clone(), device);
        let output = match is_reference {
            true => {
                let result = reference::attention(query, key, value, options);
                result.expect("the arguments fit").0
            }
            false => fused_attention(query, key, value, options),
        };
        let gradients = (output * weights).sum().backward();
        read(table.grad(&gradients).expect("the table has a gradient"))
    }
}

fn check_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance * scale,
            "{what}, element {index}: got {found}, expected {expected}"
        );
    }
}

/// Checks the table's gradient on each device against the reference in f64.
fn check(what: &str, table: &[f32], options: &dyn Fn(Tensor<1>, &Device) -> AttentionOptions) {
    let dtypes = [(DType::F32, 2e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)];
    check_of(&Operands::random(), &dtypes, what, table, options);
}

/// Checks as [`check`] does, with other operands, and with the given dtypes and tolerances.
fn check_of(
    operands: &Operands,
    dtypes: &[(DType, f64)],
    what: &str,
    table: &[f32],
    options: &dyn Fn(Tensor<1>, &Device) -> AttentionOptions,
) {
    let expected = operands.table_gradient(&Device::flex(), DType::F64, table, options, true);
    assert!(expected.iter().any(|gradient| *gradient != 0.0), "{what}");
    for target in devices() {
        for &(dtype, tolerance) in dtypes {
            if !target.supports(dtype) {
                continue;
            }
            let run = || operands.table_gradient(&target.device, dtype, table, options, false);
            let (found, again) = (run(), run());
            let what = format!("{what}, {}, {dtype:?}", target.name);
            check_close(&found, &expected, tolerance, &what);
            assert_eq!(found, again, "{what}, second run");
        }
    }
}

/// Returns the table of [`DistanceBias`] for distances up to 9.
fn distances() -> Vec<f32> {
    let biases = (0..Q_HEADS * 19).map(|index| ((index * 7) % 13) as f32 * 0.1 - 0.6);
    std::iter::once(9.0).chain(biases).collect()
}

#[test]
fn table_gradient_of_each_score_mod_matches_reference() {
    let new = AttentionOptions::new;
    check("Alibi", &[0.5, 0.25, 0.1, 0.05], &|table, _| {
        new().causal().learned_score_mod::<Alibi>(table)
    });
    check("Bent", &[0.5, 1.0, 1.5, -0.3], &|table, _| {
        new().learned_score_mod::<Bent>(table)
    });
    check("DistanceBias", &distances(), &|table, _| {
        new().causal().learned_score_mod::<DistanceBias>(table)
    });
    check("LogDistance", &[0.5, -0.25, 0.1, 1.0], &|table, _| {
        new().causal().learned_score_mod::<LogDistance>(table)
    });
    // All heads past the second share the last element of a short table.
    check("short table", &[0.5, 1.0], &|table, _| {
        new().learned_score_mod::<Bent>(table)
    });
}

/// Checks tables whose gradient tensor cores sum along diagonals of tiles. The lengths are no multiples of a tile, and
/// some tiles have queries only or keys only.
#[test]
fn table_gradient_of_many_tiles_matches_reference() {
    let new = AttentionOptions::new;
    let dtypes = [(DType::BF16, 4e-2)];
    for (sizes, name) in [
        ([200, 330, 64], "more keys"),
        ([330, 70, 40], "more queries"),
        ([150, 150, 128], "equal lengths"),
    ] {
        let operands = Operands::of(sizes);
        let what = |options: &str| format!("{name}, {options}");
        check_of(
            &operands,
            &dtypes,
            &what("causal"),
            &distances(),
            &|table, _| new().causal().learned_score_mod::<DistanceBias>(table),
        );
        check_of(
            &operands,
            &dtypes,
            &what("lengths"),
            &[0.5, 0.25, 0.1, 0.05],
            &|table, device| {
                let lengths = |lengths: [i32; 2]| Tensor::<1, Int>::from_ints(lengths, device);
                let [q_len, kv_len, _] = sizes.map(|size| size as i32);
                new()
                    .causal()
                    .kv_lengths(lengths([kv_len / 3, kv_len]))
                    .query_lengths(lengths([q_len, q_len / 2]))
                    .learned_score_mod::<Alibi>(table)
            },
        );
        check_of(
            &operands,
            &dtypes,
            &what("softcap, bias, sinks"),
            &[0.5, 0.25, 0.1, 0.05],
            &|table, device| {
                let bias = |index: usize| (index % 7) as f32 * 0.2 - 0.5;
                let bias = TensorData::new((0..sizes[1]).map(bias).collect(), [1, 1, 1, sizes[1]]);
                new()
                    .softcap(2.0)
                    .bias(Tensor::<4>::from_data(bias, device))
                    .sinks(Tensor::<1>::from_floats([0.3, -0.2, 0.0, 1.0], device))
                    .learned_score_mod::<Alibi>(table)
            },
        );
        check_of(
            &operands,
            &dtypes,
            &what("window, dropout"),
            &distances(),
            &|table, _| {
                new()
                    .window(Some(40), Some(25))
                    .dropout(0.2, 5)
                    .learned_score_mod::<DistanceBias>(table)
            },
        );
    }
}

#[test]
fn table_gradient_with_other_options_matches_reference() {
    let new = AttentionOptions::new;
    let ids = |length: usize, device: &Device| {
        let ids = (0..BATCH * length).map(|index| (index % length / 17) as i32);
        let ids = TensorData::new(ids.collect::<Vec<_>>(), [BATCH, length]);
        Tensor::<2, Int>::from_data(ids, device)
    };
    check("segments", &distances(), &|table, device| {
        new()
            .segments(ids(Q_LEN, device), ids(KV_LEN, device))
            .learned_score_mod::<DistanceBias>(table)
    });
    check("window, softcap", &[0.5, 1.0, 1.5, -0.3], &|table, _| {
        new()
            .softcap(1.5)
            .window(Some(20), Some(3))
            .learned_score_mod::<Bent>(table)
    });
    check("block mask, dropout", &distances(), &|table, device| {
        let visible: Vec<bool> = (0..4 * 5).map(|index| index % 3 != 1).collect();
        let visible = TensorData::new(visible, [1, 1, 4, 5]);
        let visible = Tensor::<4, Bool>::from_data(visible, device);
        new()
            .block_mask(BlockMask::new(visible, [16, 16]))
            .dropout(0.2, 3)
            .learned_score_mod::<DistanceBias>(table)
    });
    check("lengths", &distances(), &|table, device| {
        let lengths = |lengths: [i32; 2]| Tensor::<1, Int>::from_ints(lengths, device);
        new()
            .causal()
            .kv_lengths(lengths([31, 70]))
            .query_lengths(lengths([9, 50]))
            .learned_score_mod::<DistanceBias>(table)
    });
}

/// Checks the gradient of T5's weights against a bias that Burn's operations build from the same weights.
#[test]
fn t5_weights_gradient_equals_that_of_a_bias() {
    let operands = Operands::random();
    let weights: Vec<f32> = (0..8 * Q_HEADS)
        .map(|index| (index % 5) as f32 * 0.2)
        .collect();
    let gradient = |device: &Device, dtype, as_bias: bool| {
        let device = &device.clone().autodiff();
        let [query, key, value, loss] = operands.on(device, dtype);
        let weights = TensorData::new(weights.clone(), [8, Q_HEADS]);
        let weights = Tensor::<2>::from_data(weights, (device, DType::F32)).require_grad();
        let table = DistanceBias::t5_table(weights.clone(), true, 16);
        let options = match as_bias {
            false => AttentionOptions::new().learned_score_mod::<DistanceBias>(table),
            true => {
                let offset = (KV_LEN - Q_LEN) as i64;
                let elements = (0..Q_HEADS as i64).flat_map(|h| {
                    (0..Q_LEN as i64).flat_map(move |i| {
                        (0..KV_LEN as i64).map(move |j| {
                            (1 + h * 33 + (i + offset - j).clamp(-16, 16) + 16) as i32
                        })
                    })
                });
                let elements = elements.collect::<Vec<_>>();
                let elements = Tensor::<1, Int>::from_ints(elements.as_slice(), device);
                let bias = table.select(0, elements);
                let bias = bias.reshape([1, Q_HEADS, Q_LEN, KV_LEN]).cast(dtype);
                AttentionOptions::new().bias(bias)
            }
        };
        let output = fused_attention(query, key, value, options);
        let gradients = (output * loss).sum().backward();
        read(
            weights
                .grad(&gradients)
                .expect("the weights have a gradient"),
        )
    };
    let expected = gradient(&Device::flex(), DType::F64, true);
    for target in devices() {
        let found = gradient(&target.device, DType::F32, false);
        check_close(&found, &expected, 2e-5, target.name);
    }
}

/// Checks that the gradients of shards add up to the gradient over all keys.
#[test]
fn table_gradient_of_shards_adds_up_to_that_of_all_keys() {
    let operands = Operands::random();
    let of_heads = [0.5, 1.0, 1.5, -0.3];
    let options = |table, _: &Device| AttentionOptions::new().learned_score_mod::<Bent>(table);
    for target in devices() {
        let device = &target.device;
        let expected = operands.table_gradient(device, DType::F32, &of_heads, &options, false);
        let [query, key, value, weights] = operands.on(device, DType::F32);
        let table = Tensor::<1>::from_floats(of_heads, device);
        let options = || AttentionOptions::new().learned_score_mod::<Bent>(table.clone());
        let whole = attention_with_lse(query.clone(), key.clone(), value.clone(), options());
        let (output, logsumexp) = whole.expect("the arguments fit");
        let of_shard = |first: usize, count: usize| {
            let merged = Merged {
                output: output.clone(),
                logsumexp: logsumexp.clone(),
                output_gradient: weights.clone(),
                logsumexp_gradient: None,
            };
            let [key, value] = [&key, &value].map(|rows| rows.clone().narrow(2, first, count));
            let gradients = shards::backward(query.clone(), key, value, options(), merged);
            let table = gradients.expect("the arguments fit").table;
            table.expect("the table has a gradient")
        };
        // `Bent` depends on the position of a key modulo 3, so the second shard starts at a multiple of 3.
        let found = read(of_shard(0, 30) + of_shard(30, KV_LEN - 30));
        check_close(&found, &expected, 1e-4, target.name);
    }
}

/// Checks a call with all three optional inputs that have gradients: bias, sinks and table.
#[test]
fn table_gradient_beside_bias_and_sinks_leaves_their_gradients_equal() {
    let operands = Operands::random();
    for target in devices() {
        let device = &target.device.clone().autodiff();
        let gradients = |learned: bool| {
            let [query, key, value, weights] = operands.on(device, DType::F32);
            let query = query.require_grad();
            let table = Tensor::<1>::full([Q_HEADS], 0.3, (device, DType::F32));
            let bias = Tensor::<4>::full([1, Q_HEADS, Q_LEN, 1], 0.2, (device, DType::F32));
            let bias = bias.require_grad();
            let sinks = Tensor::<1>::full([Q_HEADS], 0.1, (device, DType::F32)).require_grad();
            let options = AttentionOptions::new()
                .bias(bias.clone())
                .sinks(sinks.clone());
            let (table, options) = match learned {
                true => {
                    let table = table.require_grad();
                    (
                        Some(table.clone()),
                        options.learned_score_mod::<Alibi>(table),
                    )
                }
                false => (None, options.score_mod::<Alibi>(Some(table))),
            };
            let output = fused_attention(query.clone(), key, value, options);
            let gradients = (output * weights).sum().backward();
            let has_table = table.is_some_and(|table| table.grad(&gradients).is_some());
            assert_eq!(has_table, learned, "{}", target.name);
            [
                query.grad(&gradients).map(read),
                bias.grad(&gradients).map(read),
                sinks.grad(&gradients).map(read),
            ]
        };
        let (with, without) = (gradients(true), gradients(false));
        assert!(with.iter().all(Option::is_some), "{}", target.name);
        assert_eq!(with, without, "{}", target.name);
    }
}
