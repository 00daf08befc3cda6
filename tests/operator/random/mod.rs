//! Random problems. First, a variant is drawn, which determines the compiled kernels. Then, the sizes, option values
//! and data of a problem are drawn for that variant.

mod check;
mod patterns;

use crate::case::{Case, Change, Extent, Hide, dtype_under_test};
use crate::dense::Layout;
use attention_cube::CausalAlignment;
use burn::tensor::DType;
pub use check::{Target, bundle, numbered};
use patterns::{Data, data, mix};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::fmt;
use std::ops::RangeInclusive;

/// The range from which the sizes of problems are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Three head sizes and short sequences. Each head size needs another kernel, and a software driver takes seconds to
    /// compile a kernel.
    Small,
    /// The sizes cover every row of the tile tables, and head sizes between the rows. The number of queries ranges from one
    /// to many. Some problems have more tiles than a GPU has multiprocessors.
    Every,
}

/// One random problem.
#[derive(Clone)]
pub struct Problem {
    /// The sizes and options of the problem.
    pub case: Case,
    /// The patterns by which the data are drawn: the mask, the bias, the sinks, and the rows that are NaN.
    pub data: Data,
}

impl fmt::Debug for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, data } = self;
        // Segment ids and intervals are not printed, because they are long lists that the problem's number determines.
        let ids = case.segments.as_ref().map(|_| (vec![], vec![]));
        let case = Case {
            segments: ids,
            intervals: vec![(vec![], vec![]); case.intervals.len()],
            ..case.clone()
        };
        write!(f, "{case:?} {data:?}")
    }
}

/// The properties of a problem that determine the compiled kernels: options, layouts, head sizes and GQA group.
#[derive(Clone, Debug)]
pub struct Variant {
    /// A case with one sequence and one key head. Every problem of the variant has the options of this case, but each
    /// problem draws its own values for these options. For example, two problems have different softcaps.
    case: Case,
    queries: RangeInclusive<usize>,
    crowd: Crowd,
    /// The number of keys of every problem is a multiple of this number. With a multiple of 8, the rows of a bias can
    /// start at multiples of 16 bytes, so that TMA can load them.
    key_step: usize,
    sizes: Sizes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crowd {
    /// The problem has few heads, and therefore few tiles.
    Few,
    /// The problem has more tiles than a GPU has multiprocessors.
    Tiles,
}

/// Pairs of `(head_dim, value_dim)`, one for each row of the tile tables. Some rows of the tables are for split-M
/// kernels, whose warps each compute some rows of the output. Other rows of the tables are for split-D kernels, whose
/// warps each compute some columns of the output.
const TABLE_WIDTHS: [(usize, usize); 9] = [
    (64, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (320, 320),
    (384, 384),
    (512, 512),
    (576, 512),
];

/// Pairs of `(head_dim, value_dim)` between the rows of the tile tables. All sizes are multiples of 8, because kernels load
/// vectors of 8 elements.
const OTHER_WIDTHS: [(usize, usize); 10] = [
    (8, 8),
    (40, 24),
    (80, 80),
    (96, 96),
    (104, 104),
    (64, 128),
    (256, 128),
    (128, 512),
    (512, 256),
    (448, 264),
];

/// Pairs of `(head_dim, value_dim)` outside of the tile tables. Some sizes are not multiples of 8, the number of
/// elements in a vector. Other sizes are wider than the tiles of any matrix unit. Engines for matrix units refuse such
/// inputs or need aligned copies of them.
const ODD_WIDTHS: [(usize, usize); 8] = [
    (1, 1),
    (5, 5),
    (33, 65),
    (90, 90),
    (100, 100),
    (258, 130),
    (700, 700),
    (1024, 1024),
];

/// The layouts that TMA can load. In these layouts, rows start at multiples of 16 bytes if they do so in a contiguous
/// tensor.
const BOXES: [Layout; 6] = [
    Layout::Contiguous,
    Layout::HeadsLast,
    Layout::Sliced {
        before: 8,
        after: 16,
    },
    Layout::Projection {
        before: 16,
        after: 8,
    },
    Layout::SharedBatch,
    Layout::SharedHeads,
];

/// The number of multiprocessors of the largest GPU for which random problems are drawn.
const MULTIPROCESSORS: usize = 132;

/// The maximum number of elements in the query of a problem with [`Crowd::Few`].
const QUERY_ELEMENTS: usize = 250_000;

impl Crowd {
    /// Returns two limits of a problem. The first limit is the maximum number of multiplications, which is the number
    /// of scores times the number of columns. The second limit is the maximum number of elements in all tensors.
    const fn room(self) -> (usize, usize) {
        match self {
            Self::Few => (40_000_000, 1_500_000),
            Self::Tiles => (150_000_000, 8_000_000),
        }
    }

    /// Returns a number of keys that every problem may have, even if this number exceeds the limits of [`room`](Self::room).
    const fn least_keys(self) -> usize {
        match self {
            Self::Few => 160,
            Self::Tiles => 24,
        }
    }
}

/// Returns a strategy that draws `Some` with the probability `likely`, and otherwise `None`.
fn perhaps<S: Strategy>(likely: f64, strategy: S) -> impl Strategy<Value = Option<S::Value>> {
    option::weighted(likely, strategy)
}

fn extent() -> impl Strategy<Value = Extent> {
    proptest::array::uniform4(prop::bool::weighted(0.7))
}

/// Returns the strategy that draws variants.
pub fn variant(sizes: Sizes) -> impl Strategy<Value = Variant> {
    // `likely` is the probability with which each option is drawn. A small value gives variants with few options, and
    // the largest value gives variants with nearly all options.
    (load(sizes), select(vec![0.1, 0.3, 0.3, 0.9])).prop_flat_map(|(variant, likely)| {
        let case = Just(variant.case.clone())
            .prop_flat_map(move |case| structure(case, likely))
            .prop_flat_map(move |case| scores(case, likely))
            .prop_flat_map(layouts);
        case.prop_map(move |case| Variant {
            case,
            ..variant.clone()
        })
    })
}

/// Returns the strategy that draws head sizes, heads and lengths of a variant without options.
fn load(sizes: Sizes) -> impl Strategy<Value = Variant> {
    let widths = match sizes {
        Sizes::Small => select(vec![(16, 16), (16, 32), (5, 5)]).boxed(),
        Sizes::Every => prop_oneof![
            7 => select(TABLE_WIDTHS.to_vec()),
            2 => select(OTHER_WIDTHS.to_vec()),
            1 => select(ODD_WIDTHS.to_vec()),
        ]
        .boxed(),
    };
    let crowds = match sizes {
        Sizes::Small => vec![Crowd::Few],
        Sizes::Every => vec![Crowd::Few, Crowd::Few, Crowd::Few, Crowd::Tiles],
    };
    let dtypes = match (dtype_under_test(), sizes) {
        (Some(dtype), _) => vec![dtype],
        (None, Sizes::Small) => vec![DType::F32, DType::F32, DType::F16, DType::BF16],
        (None, Sizes::Every) => vec![DType::F32, DType::F16, DType::BF16],
    };
    (
        widths,
        heads(sizes),
        select(crowds),
        select(dtypes),
        select(vec![1, 8]),
    )
        .prop_map(
            move |((head_dim, value_dim), (group, queries), crowd, dtype, key_step)| Variant {
                case: Case {
                    dtype,
                    ..Case::new([1, group, 1, 1, 1, head_dim, value_dim])
                },
                queries,
                crowd,
                key_step,
                sizes,
            },
        )
}

/// Returns the strategy that draws two values: the number of query heads per key head, and the range of query lengths.
/// The query length decides how many heads share a tile, and each number of heads needs other kernels. Therefore, with
/// [`Sizes::Every`], a variant whose heads may share a tile has only one query length.
fn heads(sizes: Sizes) -> BoxedStrategy<(usize, RangeInclusive<usize>)> {
    let group = || select(vec![2usize, 3, 4, 5, 7, 8, 12, 16]);
    let one = |lengths: RangeInclusive<usize>| lengths.prop_map(|length| length..=length);
    let long = || Just(97..=1200usize);
    match sizes {
        Sizes::Small => {
            let lengths = select(vec![1..=4, 1..=80, 1..=80]);
            (select(vec![1, 1, 2, 5]), lengths).boxed()
        }
        Sizes::Every => prop_oneof![
            2 => (Just(1), Just(1..=8usize)),
            2 => (Just(1), Just(9..=96usize)),
            3 => (Just(1), long()),
            3 => (group(), one(1..=8)),
            1 => (group(), one(9..=60)),
            3 => (group(), long()),
        ]
        .boxed(),
    }
}

fn structure(case: Case, likely: f64) -> impl Strategy<Value = Case> {
    (
        option::of(select(vec![
            CausalAlignment::BottomRight,
            CausalAlignment::BottomRight,
            CausalAlignment::TopLeft,
        ])),
        perhaps(likely, Just(0)),
        perhaps(likely, Just(0)),
        perhaps(likely, extent()),
        // Half of the masks are block masks. Some block sizes divide the kernels' tiles, and some do not.
        perhaps(
            0.5,
            select(vec![[1, 64], [16, 16], [64, 64], [128, 128], [5, 48]]),
        ),
        perhaps(likely, Just(vec![])),
        perhaps(0.5 * likely, Just(vec![])),
        perhaps(likely, Just((vec![], vec![]))),
        // Intervals and query lengths (`query_lengths`) need kernels of their own, so they are drawn less often than other
        // options.
        perhaps(0.2 * likely, 1..=2usize),
    )
        .prop_map(
            move |(
                causal,
                left,
                right,
                mask,
                mask_block,
                kv_lengths,
                query_lengths,
                segments,
                intervals,
            )| {
                Case {
                    causal,
                    window: (left, right),
                    mask,
                    mask_block: mask.and(mask_block),
                    kv_lengths,
                    query_lengths,
                    segments,
                    intervals: vec![(vec![], vec![]); intervals.unwrap_or(0)],
                    ..case.clone()
                }
            },
        )
}

fn scores(case: Case, likely: f64) -> impl Strategy<Value = Case> {
    (
        // A kernel may take the row maximum before it applies a positive scale, but not before a negative one. Positive and
        // negative scales thus need different kernels.
        perhaps(0.4, select(vec![1.0, 1.0, -1.0])),
        perhaps(likely, Just(1.0)),
        perhaps(likely, extent()),
        prop::bool::weighted(likely),
        any::<bool>(),
        any::<bool>(),
        perhaps(0.3 * likely, (select(vec![0.1, 0.5, 0.97]), any::<u64>())),
        // Score mods and mask mods need kernels of their own, so the strategy draws them less often than other options.
        perhaps(0.2 * likely, Just(Change::Bent)),
        perhaps(0.2 * likely, select(vec![Hide::Sieve, Hide::Keys])),
    )
        .prop_map(
            move |(
                scale,
                softcap,
                bias,
                sinks,
                f32_extras,
                lse_gradient,
                dropout,
                score_mod,
                mask_mod,
            )| Case {
                scale,
                softcap,
                bias,
                sinks,
                f32_extras,
                lse_gradient,
                dropout,
                score_mod,
                mask_mod,
                ..case.clone()
            },
        )
}

fn layouts(case: Case) -> impl Strategy<Value = Case> {
    let gradient = select(vec![
        Layout::Contiguous,
        Layout::Contiguous,
        Layout::HeadsLast,
        Layout::Transposed,
        Layout::SharedBatch,
        Layout::SharedHeads,
    ]);
    // The closure `boxes` draws layouts that TMA can read, and `any_layout` draws any layout.
    let boxes = || select(BOXES.to_vec());
    let any_layout = || select(Layout::ALL.to_vec());
    let contiguous = Just([Layout::Contiguous; 3]);
    let operands = prop_oneof![
        2 => contiguous,
        3 => [boxes(), boxes(), boxes()],
        2 => [any_layout(), any_layout(), any_layout()],
    ];
    (operands, gradient, prop::bool::weighted(0.25)).prop_map(
        move |([query, key, value], gradient, expanded)| Case {
            layouts: [query, key, value, gradient],
            expanded,
            ..case.clone()
        },
    )
}

impl Variant {
    /// Returns the strategy that draws problems of this variant.
    pub fn problem(&self) -> impl Strategy<Value = Problem> + use<> {
        (self.sized(), data())
            .prop_flat_map(|(case, data)| (numbers(case), Just(data)))
            .prop_map(|(case, data)| Problem { case, data })
    }

    /// Returns the strategy that draws the sizes of a problem. The sizes are limited to keep the time of the f64 reference
    /// short.
    fn sized(&self) -> impl Strategy<Value = Case> + use<> {
        let variant = self.clone();
        let parts = 0.0..1.0f64;
        (
            1usize..=3,
            1usize..=3,
            1usize..=8,
            0usize..60,
            parts.clone(),
            parts,
        )
            .prop_map(
                move |(batch, kv_heads, sequences, surplus, query_part, key_part)| {
                    let queries = variant.queries.clone();
                    let span = (queries.end() - queries.start()) as f64;
                    let drawn =
                        queries.start() + (query_part * query_part * (span + 0.999)) as usize;
                    match variant.crowd {
                        Crowd::Few => variant.few([batch, kv_heads, drawn], key_part),
                        Crowd::Tiles => variant.tiles(sequences, surplus, drawn, key_part),
                    }
                },
            )
    }

    /// Returns the variant's case with the given numbers of sequences, key heads and queries. `key_part` is a fraction
    /// from 0 to 1. The limits allow a maximum number of keys. The returned case has about `key_part`² times this
    /// maximum.
    fn case(&self, [batch, kv_heads, q_len]: [usize; 3], key_part: f64) -> Case {
        let case = self.case.clone();
        let group = case.q_heads;
        let columns = case.head_dim + case.value_dim;
        let longest = match (self.sizes, q_len) {
            (Sizes::Small, _) => 140,
            (Sizes::Every, 1..=8) => 6000,
            (Sizes::Every, _) => 1200,
        };
        let (products, elements) = self.crowd.room();
        let planes = batch * kv_heads;
        let rows = planes * group * q_len;
        let most = (products / (rows * columns))
            .min(elements.saturating_sub(rows * columns) / (planes * columns))
            .clamp(self.crowd.least_keys().min(longest), longest) as f64;
        let kv_len = 1 + (key_part * key_part * most) as usize;
        Case {
            batch,
            q_heads: kv_heads * group,
            kv_heads,
            q_len,
            kv_len: kv_len.next_multiple_of(self.key_step),
            ..case
        }
    }

    fn few(&self, [batch, kv_heads, drawn]: [usize; 3], key_part: f64) -> Case {
        let row = self.case.q_heads * self.case.head_dim.max(self.case.value_dim);
        let shortest = *self.queries.start();
        let q_len = drawn.min((QUERY_ELEMENTS / row).max(shortest));
        let planes = (QUERY_ELEMENTS / (row * q_len)).max(1);
        let batch = batch.min(planes);
        let kv_heads = kv_heads.min(planes / batch);
        self.case([batch, kv_heads, q_len], key_part)
    }

    /// Returns a case in which the number of tiles exceeds the number of multiprocessors by at least `surplus + 1`.
    fn tiles(&self, sequences: usize, surplus: usize, drawn: usize, key_part: f64) -> Case {
        let Case {
            q_heads: group,
            head_dim,
            value_dim,
            ..
        } = self.case;
        // `rows` is the number of rows per tile that the tile tables list for the head size.
        let rows = match head_dim.max(value_dim) {
            ..=64 => 192,
            65..=256 => 128,
            _ => 64,
        };
        let q_len = drawn.min(260);
        let tiles = match rows / q_len {
            0 | 1 => group * q_len.div_ceil(rows),
            sharing => group.div_ceil(sharing.min(group)),
        };
        let planes = (MULTIPROCESSORS + 1 + surplus).div_ceil(tiles);
        let batch = sequences.min(planes);
        let kv_heads = planes.div_ceil(batch);
        self.case([batch, kv_heads, q_len], key_part)
    }
}

/// Returns the strategy that draws the values of the options that `case` has, such as the softcap or the window.
fn numbers(case: Case) -> impl Strategy<Value = Case> {
    let Case {
        batch,
        q_len,
        kv_len,
        ..
    } = case;
    let positive = prop_oneof![3 => 0.01..1.0f64, 1 => Just(1.0)];
    let other = prop_oneof![3 => -1.0..0.0f64, 1 => Just(0.0), 1 => Just(1e-31)];
    let softcap = prop_oneof![
        4 => 0.5..20.0f64,
        1 => select(vec![0.01, 1e3, 1e5, 1e6, 1e8, 1e30]),
    ];
    let reach = || prop_oneof![9 => 0..kv_len + 3, 1 => Just(usize::MAX)];
    let length_up_to = |most: i64| {
        prop_oneof![
            4 => 0..most + 5,
            1 => select(vec![
                0,
                most,
                -1,
                i64::MIN,
                i64::MAX,
                1 << 31,
                (1 << 32) + 3,
            ]),
        ]
    };
    let length = length_up_to(kv_len as i64);
    let query_length = length_up_to(q_len as i64);
    // The segments of a problem are either packed documents of one length, or ids in no order.
    let document = (1..=kv_len.max(q_len), prop::bool::weighted(0.3), 0..1000u64);
    // The intervals of a problem either grow with the query, like a causal window, or have random bounds. Some intervals are
    // empty or reach past the keys.
    let intervals = (prop::bool::weighted(0.5), 0..1000u64);
    let amplitude = select([vec![1.0; 19], vec![8.0]].concat());
    (
        (positive, other),
        softcap,
        (reach(), reach()),
        vec(length, batch),
        vec(query_length, batch),
        document,
        intervals,
        amplitude,
    )
        .prop_map(
            move |(
                (positive, other),
                softcap,
                (left, right),
                lengths,
                query_lengths,
                document,
                (grow, salt),
                amplitude,
            )| {
                // An expanded tensor stores only one sequence, so its data are the ids of a single sequence.
                let sequences = if case.expanded { 1 } else { batch };
                let ids = |end: usize, length: usize| -> Vec<i64> {
                    let (run, scattered, salt) = document;
                    let tokens = (0..sequences).flat_map(|b| (0..length).map(move |t| (b, t)));
                    tokens
                        .map(|(b, token)| match scattered {
                            true => (mix(salt, [b, token, length]) % 5) as i64 - 2,
                            false => ((token + end - length) / run) as i64 + b as i64,
                        })
                        .collect()
                };
                let end = q_len.max(kv_len);
                let interval = |which: usize| -> (Vec<i64>, Vec<i64>) {
                    let queries = (0..sequences).flat_map(|b| (0..q_len).map(move |i| (b, i)));
                    let keys = kv_len as i64;
                    let drawn = |kind: usize, b: usize, i: usize| {
                        (mix(salt, [which, kind, b, i]) % (kv_len as u64 + 9)) as i64 - 4
                    };
                    let pair = |(b, i): (usize, usize)| match (grow, mix(salt, [which, b, i]) % 64)
                    {
                        (_, 0) => (i64::from(i32::MIN), i64::from(i32::MAX)),
                        (_, 1) => (keys, 0),
                        (true, _) => {
                            let block = i / 24 * 24;
                            let own = (block * kv_len / q_len) as i64;
                            let first = (own - drawn(0, b, block)).max(-3);
                            (first, own + 24 + which as i64 * drawn(1, b, block))
                        }
                        (false, _) => (drawn(0, b, i), drawn(1, b, i)),
                    };
                    queries.map(pair).unzip()
                };
                Case {
                    intervals: (0..case.intervals.len()).map(interval).collect(),
                    scale: case
                        .scale
                        .map(|kind| if kind > 0.0 { positive } else { other }),
                    softcap: case.softcap.map(|_| softcap),
                    window: (case.window.0.map(|_| left), case.window.1.map(|_| right)),
                    kv_lengths: (case.kv_lengths.as_ref()).map(|_| lengths[..sequences].to_vec()),
                    query_lengths: (case.query_lengths.as_ref())
                        .map(|_| query_lengths[..sequences].to_vec()),
                    segments: (case.segments.as_ref()).map(|_| (ids(end, q_len), ids(end, kv_len))),
                    amplitude,
                    ..case.clone()
                }
            },
        )
}
