//! Random problems: what kernels are compiled for is drawn first, then sizes, numbers and data for these.

mod check;
mod patterns;

use crate::case::{Case, Extent};
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

/// Which sizes problems have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Three head sizes and short sequences: each head size is another kernel, and a software driver takes seconds for it.
    Small,
    /// Every row of the tile tables and sizes between, one query to many, and more tiles than a card has multiprocessors.
    Every,
}

/// One random problem.
#[derive(Clone)]
pub struct Problem {
    /// Sizes and options.
    pub case: Case,
    /// What is special about its data.
    pub data: Data,
}

impl fmt::Debug for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, data } = self;
        // Ids are many, and a function of the problem's number.
        let ids = case.segments.as_ref().map(|_| (vec![], vec![]));
        let case = Case {
            segments: ids,
            ..case.clone()
        };
        write!(f, "{case:?} {data:?}")
    }
}

/// What kernels are compiled for. A problem of it has the same options, layouts, head sizes and group.
#[derive(Clone, Debug)]
pub struct Variant {
    /// One sequence and one key head; of the options, only whether they are there and their kind counts.
    case: Case,
    queries: RangeInclusive<usize>,
    crowd: Crowd,
    /// Key lengths are multiples of it.
    key_step: usize,
    sizes: Sizes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crowd {
    /// A few heads.
    Few,
    /// More tiles than multiprocessors.
    Tiles,
}

/// Head and value sizes: each row of the tile tables, split-M and split-D.
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

/// Between the rows, whole vectors.
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

/// Such as tiles for any device have to take: no vectors, or wider than any matrix unit's tiles.
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

/// Layouts whose rows start at multiples of 16 bytes where the contiguous one's do.
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

/// Multiprocessors of the largest card these problems are for.
const MULTIPROCESSORS: usize = 132;

/// Elements of the queries that a problem of few heads may have.
const QUERY_ELEMENTS: usize = 250_000;

impl Crowd {
    /// Products of a score and a column, of queries and keys or of values, that a problem may ask for, and elements that it
    /// may have in all: what one processor core draws, and makes the definition of in f64, in a fraction of a second.
    const fn room(self) -> (usize, usize) {
        match self {
            Self::Few => (40_000_000, 1_500_000),
            Self::Tiles => (150_000_000, 8_000_000),
        }
    }

    /// Keys that there is room for always.
    const fn least_keys(self) -> usize {
        match self {
            Self::Few => 160,
            Self::Tiles => 24,
        }
    }
}

/// Mostly `None`, by what is `likely`.
fn perhaps<S: Strategy>(likely: f64, strategy: S) -> impl Strategy<Value = Option<S::Value>> {
    option::weighted(likely, strategy)
}

fn extent() -> impl Strategy<Value = Extent> {
    proptest::array::uniform4(prop::bool::weighted(0.7))
}

/// What kernels are compiled for.
pub fn variant(sizes: Sizes) -> impl Strategy<Value = Variant> {
    // Combinations of few options, of some, and of nearly all.
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

/// Widths, heads and lengths, without options.
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
    let dtypes = match sizes {
        Sizes::Small => vec![DType::F32, DType::F32, DType::F16, DType::BF16],
        // Half precision has more kernels.
        Sizes::Every => [[DType::F32; 2], [DType::F16; 2], [DType::BF16; 2]].concat(),
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

/// Query heads of a key head, and lengths of queries. Where heads may share a tile, kernels are compiled for how many do:
/// then there is one length.
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
        perhaps(likely, Just(vec![])),
        perhaps(likely, Just((vec![], vec![]))),
    )
        .prop_map(
            move |(causal, left, right, mask, kv_lengths, segments)| Case {
                causal,
                window: (left, right),
                mask,
                kv_lengths,
                segments,
                ..case.clone()
            },
        )
}

fn scores(case: Case, likely: f64) -> impl Strategy<Value = Case> {
    (
        // Kernels may multiply by a positive scale late.
        perhaps(0.4, select(vec![1.0, 1.0, -1.0])),
        perhaps(likely, Just(1.0)),
        perhaps(likely, extent()),
        prop::bool::weighted(likely),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            move |(scale, softcap, bias, sinks, f32_extras, lse_gradient, deterministic)| Case {
                scale,
                softcap,
                bias,
                sinks,
                f32_extras,
                lse_gradient,
                deterministic,
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
    // Rows that a copy engine can read, and any.
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
    /// A problem that it serves.
    pub fn problem(&self) -> impl Strategy<Value = Problem> + use<> {
        (self.sized(), data())
            .prop_flat_map(|(case, data)| (numbers(case), Just(data)))
            .prop_map(|(case, data)| Problem { case, data })
    }

    /// Draws what sizes are made of; they end at what the definition can do in no time.
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

    /// The case of so many sequences, key heads and queries, with a part of the keys that there is room for.
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

    /// `surplus` tiles more than there are multiprocessors.
    fn tiles(&self, sequences: usize, surplus: usize, drawn: usize, key_part: f64) -> Case {
        let Case {
            q_heads: group,
            head_dim,
            value_dim,
            ..
        } = self.case;
        // As the tile tables have it.
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

/// The numbers of the options that `case` has.
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
    let length = prop_oneof![
        4 => 0..kv_len as i64 + 5,
        1 => select(vec![
            0,
            kv_len as i64,
            -1,
            i64::MIN,
            i64::MAX,
            1 << 31,
            (1 << 32) + 3,
        ]),
    ];
    // Packed documents of one length, or ids without order.
    let document = (1..=kv_len.max(q_len), prop::bool::weighted(0.3), 0..1000u64);
    let amplitude = select([vec![1.0; 19], vec![8.0]].concat());
    (
        (positive, other),
        softcap,
        (reach(), reach()),
        vec(length, batch),
        document,
        amplitude,
    )
        .prop_map(
            move |((positive, other), softcap, (left, right), lengths, document, amplitude)| {
                // What is expanded is there once.
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
                Case {
                    scale: case
                        .scale
                        .map(|kind| if kind > 0.0 { positive } else { other }),
                    softcap: case.softcap.map(|_| softcap),
                    window: (case.window.0.map(|_| left), case.window.1.map(|_| right)),
                    kv_lengths: (case.kv_lengths.as_ref()).map(|_| lengths[..sequences].to_vec()),
                    segments: (case.segments.as_ref()).map(|_| (ids(end, q_len), ids(end, kv_len))),
                    amplitude,
                    ..case.clone()
                }
            },
        )
}
