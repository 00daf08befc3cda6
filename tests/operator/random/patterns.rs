//! The patterns of a random problem's data: masks, biases, sinks, and NaN in rows that no kernel may read.

use crate::case::Case;
use crate::compare::Named;
use crate::dense::{Dense, Layout};
use crate::inputs::Inputs;
use burn::tensor::DType;
use proptest::prelude::*;
use proptest::sample::select;

/// The patterns of a problem's data. Two problems with the same patterns get different data if their `salt` differs.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    mask: MaskPattern,
    bias: BiasPattern,
    sinks: SinkPattern,
    poison: Poison,
    salt: u64,
}

#[derive(Clone, Copy, Debug)]
enum MaskPattern {
    /// The mask of [`Case::inputs`]: seven of ten pairs of a query and a key are visible.
    Random,
    /// One of sixteen pairs of a query and a key is visible.
    Sparse,
    /// Sequences have different lengths and all end at the last key. The keys before the start of a sequence are hidden, as
    /// in left padding.
    LeftPadded,
    /// Several consecutive queries in each sequence see no key.
    BlindQueries,
    /// The mask is drawn per block of pairs of a query and a key. In a block, all pairs are hidden, all pairs are visible,
    /// or most pairs are visible.
    Blocks,
    /// Some keys are hidden from all queries: single keys and many consecutive keys.
    UnseenKeys,
    /// All pairs of a query and a key are visible.
    Open,
    /// All pairs of a query and a key are hidden.
    Closed,
}

#[derive(Clone, Copy, Debug)]
enum BiasPattern {
    /// The bias of [`Case::inputs`], which is normally distributed.
    Normal,
    /// The bias is −∞ for one of eight pairs of a query and a key.
    Hides,
    /// The bias is −∞ for several consecutive queries in each sequence, which then see no key.
    BlindQueries,
    /// The bias is −∞ for some keys, which no query then sees.
    UnseenKeys,
    /// The bias is the lowest finite number for one of four pairs of a query and a key. Such a bias is an ordinary number and
    /// hides no key.
    Lowest,
    /// The bias is the lowest finite number for all keys of several consecutive queries. All scores of such a query are then
    /// near this number.
    LowestQueries,
}

#[derive(Clone, Copy, Debug)]
enum SinkPattern {
    /// The sinks of [`Case::inputs`], which are normally distributed.
    Normal,
    /// The sink is −∞ for every other head.
    SomeInfinite,
    /// The sink is −∞ for all heads.
    AllInfinite,
    /// The sinks are larger than most scores.
    Large,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Poison {
    None,
    /// Keys and values that no query sees are NaN or infinite, and so are queries that see no key. Such rows must not
    /// change any result.
    Unused,
    /// A key or a value that some query sees is NaN. The NaN must not change the results of queries that see no key.
    Seen,
}

/// Returns the strategy that draws patterns. Data without special values are the most frequent.
pub fn data() -> impl Strategy<Value = Data> {
    use {BiasPattern as B, MaskPattern as M, SinkPattern as S};
    (
        select(vec![
            M::Random,
            M::Random,
            M::Sparse,
            M::LeftPadded,
            M::LeftPadded,
            M::BlindQueries,
            M::Blocks,
            M::Blocks,
            M::UnseenKeys,
            M::Open,
            M::Closed,
        ]),
        select(vec![
            B::Normal,
            B::Normal,
            B::Normal,
            B::Hides,
            B::BlindQueries,
            B::UnseenKeys,
            B::Lowest,
            B::LowestQueries,
        ]),
        select(vec![
            S::Normal,
            S::Normal,
            S::SomeInfinite,
            S::AllInfinite,
            S::Large,
        ]),
        select(vec![
            Poison::None,
            Poison::Unused,
            Poison::Unused,
            Poison::Seen,
        ]),
        0..1000u64,
    )
        .prop_map(|(mask, bias, sinks, poison, salt)| Data {
            mask,
            bias,
            sinks,
            poison,
            salt,
        })
}

/// Returns a pseudo-random number that depends on `salt` and `numbers`.
pub fn mix(salt: u64, numbers: impl IntoIterator<Item = usize>) -> u64 {
    numbers.into_iter().fold(salt, |mixed, number| {
        // The mixing function is the one of SplitMix64 (Steele et al.).
        let mut z = (mixed ^ number as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// Returns true if `row` is in the range of consecutive rows that is chosen at random for sequence `b`.
fn in_run(salt: u64, b: usize, row: usize, rows: usize) -> bool {
    let drawn = |what| mix(salt, [b, what]) as usize % rows;
    let start = drawn(0);
    (start..=start + drawn(1)).contains(&row)
}

fn is_unseen_key(key: usize) -> bool {
    key % 16 == 5 || (60..150).contains(&key)
}

/// Returns the lowest finite number of the bias's dtype. For an f32 bias, an even `salt` gives the lowest number of bf16
/// instead.
fn lowest(dtype: DType, salt: u64) -> f64 {
    let bf16 = f64::from(f32::from_bits(0xFF7F_0000));
    match dtype {
        DType::F16 => -65504.0,
        DType::BF16 => bf16,
        _ if salt.is_multiple_of(2) => bf16,
        _ => f64::from(f32::MIN),
    }
}

impl MaskPattern {
    fn apply(self, case: &Case, salt: u64, mask: &mut Dense) {
        let visible = |[b, h, i, j]: [usize; 4]| match self {
            Self::Random | Self::Open => true,
            Self::Closed => false,
            Self::Sparse => mix(salt, [b, h, i, j]).is_multiple_of(16),
            Self::LeftPadded => j >= mix(salt, [b]) as usize % (case.kv_len + 1),
            Self::BlindQueries => !in_run(salt, b, i, case.q_len),
            Self::UnseenKeys => !is_unseen_key(j),
            Self::Blocks => match mix(salt, [b, h, i / 64, j / 128]) % 3 {
                0 => false,
                1 => true,
                _ => !(i + j).is_multiple_of(7),
            },
        };
        if !matches!(self, Self::Random) {
            *mask = Dense::from_fn(mask.shape, |at| f64::from(visible(at)));
        }
    }
}

impl BiasPattern {
    fn apply(self, case: &Case, salt: u64, bias: &mut Dense) {
        let is_special = |[b, h, i, j]: [usize; 4]| match self {
            Self::Normal => false,
            Self::Hides => mix(salt, [b, h, i, j]).is_multiple_of(8),
            Self::Lowest => mix(salt, [b, h, i, j]).is_multiple_of(4),
            Self::UnseenKeys => is_unseen_key(j),
            Self::BlindQueries | Self::LowestQueries => in_run(salt, b, i, case.q_len),
        };
        let special = match self {
            Self::Lowest | Self::LowestQueries => lowest(case.extras_dtype(), salt),
            _ => f64::NEG_INFINITY,
        };
        *bias = Dense::from_fn(bias.shape, |at| match is_special(at) {
            true => special,
            false => bias.at(at),
        });
    }
}

impl SinkPattern {
    fn apply(self, sinks: &mut Dense) {
        for (head, sink) in sinks.values.iter_mut().enumerate() {
            match self {
                Self::Normal => {}
                Self::SomeInfinite if head % 2 == 1 => {}
                Self::SomeInfinite | Self::AllInfinite => *sink = f64::NEG_INFINITY,
                Self::Large => *sink = 12.0,
            }
        }
    }
}

/// Returns a flag for each row of a tensor `[batch, heads, length]`. A true flag means that the row is replaced by NaN
/// or infinity. `marked` holds the same kind of flags, but does not take the layout into account. If several heads or
/// sequences share one stored row, the row is replaced only if all of them have a true flag in `marked`.
fn marked_by_all(marked: &[bool], [batch, heads, length]: [usize; 3], layout: Layout) -> Vec<bool> {
    let at = |b, h, row| marked[(b * heads + h) * length + row];
    let by_all = |index: usize| {
        let (b, h, row) = (
            index / length / heads,
            index / length % heads,
            index % length,
        );
        match layout {
            Layout::SharedBatch => (0..batch).all(|b| at(b, h, row)),
            Layout::SharedHeads => (0..heads).all(|h| at(b, h, row)),
            _ => at(b, h, row),
        }
    };
    (0..marked.len()).map(by_all).collect()
}

fn is_shared(layout: Layout) -> bool {
    matches!(layout, Layout::SharedBatch | Layout::SharedHeads)
}

/// The inputs of a problem, one set for the device and one for the reference.
pub struct Drawn {
    /// The inputs that the device gets, in which some rows may be NaN or infinite.
    pub given: Inputs,
    /// The inputs that the reference gets, without NaN in unused rows. `given` and `clean` must give the same results.
    pub clean: Inputs,
    /// The sequence and the key head in which a visible key or value is NaN, as two indices. `None` if no visible key
    /// or value is NaN.
    tainted: Option<[usize; 2]>,
    /// True for each query that sees no key, indexed as `[batch, q_heads, q_len]`.
    blind: Vec<bool>,
}

impl Data {
    /// Draws the inputs of `case` with the patterns in `self`.
    pub fn draw(&self, case: &Case) -> Drawn {
        let mut clean = case.inputs();
        if let Some(mask) = &mut clean.mask {
            self.mask.apply(case, self.salt, mask);
            clean.coarsen_mask();
        }
        if let Some(bias) = &mut clean.bias {
            self.bias.apply(case, self.salt, bias);
        }
        if let Some(sinks) = &mut clean.sinks {
            self.sinks.apply(sinks);
        }
        let unused = case.unused(&clean);
        let mut given = clean.clone();
        clean = clean.with_mask_of_scores();
        let mut tainted = None;
        if self.poison != Poison::None {
            let [query, key, value, gradient] = case.layouts;
            let (batch, q_len, kv_len) = (case.batch, case.q_len, case.kv_len);
            let queries = [batch, case.q_heads, q_len];
            let keys = [batch, case.kv_heads, kv_len];
            let fill = |dense: &mut Dense, poison, marked: &[bool], shape, layout| {
                let marked = marked_by_all(marked, shape, layout);
                let [_, heads, length] = shape;
                dense.fill_rows(poison, |[b, h, row]| marked[(b * heads + h) * length + row]);
            };
            fill(&mut given.query, f64::NAN, &unused.queries, queries, query);
            fill(&mut given.key, f64::NAN, &unused.keys, keys, key);
            fill(&mut given.value, f64::INFINITY, &unused.keys, keys, value);
            let of_output = &mut given.output_gradient;
            fill(of_output, f64::NAN, &unused.queries, queries, gradient);
            let drawn = mix(self.salt, [unused.keys.len()]) as usize % unused.keys.len();
            if self.poison == Poison::Seen && !is_shared(key) && !is_shared(value) {
                let plane = [
                    drawn / kv_len / case.kv_heads,
                    drawn / kv_len % case.kv_heads,
                ];
                let operand = match self.salt.is_multiple_of(2) {
                    true => &mut given.value,
                    false => &mut given.key,
                };
                operand.fill_rows(f64::NAN, |[b, h, row]| {
                    [b, h, row] == [plane[0], plane[1], drawn % kv_len]
                });
                tainted = (!unused.keys[drawn]).then_some(plane);
            }
        }
        Drawn {
            given,
            clean,
            tainted,
            blind: unused.queries,
        }
    }
}

impl Drawn {
    /// Returns a copy of `got` in which the expected results replace all undefined results. If a visible key or value
    /// is NaN, the results of each query that sees any key of the same KV head are undefined. The gradients of that
    /// head's keys and values, and all sums over queries, are undefined too.
    pub fn settle(&self, case: &Case, mut got: Vec<Named>, exact: &[Named]) -> Vec<Named> {
        let Some(tainted) = self.tainted else {
            return got;
        };
        let group = case.q_heads / case.kv_heads;
        let open_query = |[b, h, i]: [usize; 3]| {
            [b, h / group] == tainted && !self.blind[(b * case.q_heads + h) * case.q_len + i]
        };
        let open_rows = |like: &Dense, layout: Layout, is_open: &dyn Fn([usize; 3]) -> bool| {
            let open = |[b, h, row, _]: [usize; 4]| f64::from(is_open([b, h, row]));
            layout.store(&Dense::from_fn(like.shape, open)).values
        };
        let contiguous = Layout::Contiguous;
        let open_key = |[b, h, _]: [usize; 3]| [b, h] == tainted;
        let Inputs {
            query,
            key,
            value,
            output_gradient,
            ..
        } = &self.clean;
        for (got, exact) in got.iter_mut().zip(exact) {
            let open = match got.name {
                "output" => open_rows(output_gradient, contiguous, &open_query),
                "logsumexp" => {
                    let rows = Dense::from_fn([case.batch, case.q_heads, case.q_len, 1], |_| 0.0);
                    open_rows(&rows, contiguous, &open_query)
                }
                "query gradient" if !is_shared(case.layouts[0]) => {
                    open_rows(query, case.layouts[0], &open_query)
                }
                "key gradient" => open_rows(key, case.layouts[1], &open_key),
                "value gradient" => open_rows(value, case.layouts[2], &open_key),
                _ => vec![1.0; got.values.len()],
            };
            for ((got, exact), open) in got.values.iter_mut().zip(&exact.values).zip(open) {
                if open == 1.0 {
                    *got = *exact;
                }
            }
        }
        got
    }
}
