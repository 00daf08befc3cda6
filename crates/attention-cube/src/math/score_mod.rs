//! Scores and masks as code: the traits that a user implements, and the representation of a user's code in the
//! compile-time settings of kernels.
//!
//! The public module [`crate::score_mod`] explains the traits to users.

#[cfg(feature = "cube")]
pub(crate) mod kernel;

#[cfg(feature = "cube")]
use cubecl::prelude::*;
use std::any::{TypeId, type_name};
use std::fmt;
use std::hash::{Hash, Hasher};

/// Replaces CubeCL's macro `comptime!` in a build without CubeCL, where functions run on the CPU only.
#[cfg(not(feature = "cube"))]
macro_rules! comptime {
    ($value:expr) => {
        $value
    };
}

/// The sequence, query head, query and key of a score, which the code of a [`ScoreMod`] or [`MaskMod`] gets as an
/// argument.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "cube", derive(CubeType), expand(derive(Clone, Copy)))]
pub struct ScorePlace {
    /// The index of the sequence.
    pub batch: u32,
    /// The index of the query head.
    pub head: u32,
    /// The index of the query in its sequence.
    pub query: i32,
    /// The index of the key in its sequence.
    pub key: i32,
    /// The position of query 0, as a key index.
    pub(crate) offset: i32,
    /// The form in which the kernel knows the distance from the key to the query's own position as f32.
    #[cfg_attr(feature = "cube", cube(comptime))]
    float_form: FloatForm,
    /// The part of the distance that many scores share, see [`FloatForm::Known`]. Otherwise 0.
    float_base: f32,
    /// 1 if no distance of the thread's row in the block is negative, or −1 if none is positive. The field has a meaning
    /// only with [`FloatForm::OneSided`].
    direction: f32,
}

/// The form in which a kernel knows the distance of a score as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    not(feature = "cuda"),
    allow(
        dead_code,
        reason = "only kernels for tensor cores know the distance as f32"
    )
)]
pub(crate) enum FloatForm {
    /// The kernel knows the distance as an integer only.
    Unknown,
    /// The distance is `float_base` plus this number. The number is a compile-time constant, so the kernel converts one
    /// integer to f32 for many scores.
    Known(i32),
    /// As [`Known`](Self::Known), and all distances of a row in the block have the same sign. The sign is `direction`.
    OneSided(i32),
}

impl FloatForm {
    /// True if the kernel knows the distance as f32.
    const fn is_known(self) -> bool {
        !matches!(self, Self::Unknown)
    }

    /// Returns the number to add to `float_base`.
    const fn step(self) -> f32 {
        match self {
            Self::Unknown => 0.0,
            Self::Known(step) | Self::OneSided(step) => step as f32,
        }
    }
}

/// Replaces CubeCL's `fma` in a build without CubeCL.
#[cfg(not(feature = "cube"))]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

#[cfg_attr(feature = "cube", cube)]
impl ScorePlace {
    pub(crate) fn new(batch: u32, head: u32, query: i32, key: i32, offset: i32) -> ScorePlace {
        ScorePlace {
            batch,
            head,
            query,
            key,
            offset,
            float_form: comptime!(FloatForm::Unknown),
            float_base: 0.0f32,
            direction: 1.0f32,
        }
    }

    /// Returns the number of keys from the key to the query's own position. It is 0 for the query's own key, positive for
    /// earlier keys and negative for later keys.
    ///
    /// Positions follow the alignment of the causal mask. With bottom-right alignment, the last query has the position
    /// of the last key. See also [`kv_lengths`](crate::AttentionOptions::kv_lengths).
    pub fn distance(&self) -> i32 {
        self.query + self.offset - self.key
    }

    /// Returns the distance as f32. On tensor cores this is cheaper than converting [`distance`](Self::distance) to
    /// f32. From a distance of 2²⁴ on, different kernels may round the same distance to different numbers. A mask must
    /// therefore not depend on such distances.
    pub fn distance_f32(&self) -> f32 {
        if comptime!(self.float_form.is_known()) {
            self.float_base + comptime!(self.float_form.step())
        } else {
            self.distance() as f32
        }
    }

    /// Returns `factor` times the distance. On tensor cores this is cheaper than a product with
    /// [`distance_f32`](Self::distance_f32).
    ///
    /// `factor` should be equal for all keys of a query, such as a number per head. Kernels then compute a part of the
    /// product once for many scores. The error is up to 2⁻²⁴ of `factor` times a distance in the same block of keys. The
    /// result for the distance 0 may therefore differ from 0, and may be negative.
    pub fn distance_times(&self, factor: f32) -> f32 {
        if comptime!(self.float_form.is_known()) {
            let step = comptime!(self.float_form.step());
            fma(factor, step, factor * self.float_base)
        } else {
            factor * self.distance_f32()
        }
    }

    /// Returns `factor` times the magnitude of the distance. See [`distance_times`](Self::distance_times). The result has
    /// the sign of `factor`.
    pub fn abs_distance_times(&self, factor: f32) -> f32 {
        if comptime!(matches!(self.float_form, FloatForm::OneSided(_))) {
            self.distance_times(factor * self.direction)
        } else {
            factor * self.distance_f32().abs()
        }
    }
}

#[cfg(feature = "cube")]
#[cube]
impl ScorePlace {
    /// Returns a copy of `self` with the distance as f32. The fields of [`ScorePlace`] explain the arguments.
    #[allow(dead_code, reason = "kernels call only the expansion")]
    pub(crate) fn with_float_distance(
        &self,
        float_base: f32,
        direction: f32,
        #[comptime] float_form: FloatForm,
    ) -> ScorePlace {
        ScorePlace {
            batch: self.batch,
            head: self.head,
            query: self.query,
            key: self.key,
            offset: self.offset,
            float_form,
            float_base,
            direction,
        }
    }
}

/// The f32 elements that the code of a [`ScoreMod`] or [`MaskMod`] reads.
#[derive(Clone, Debug)]
pub struct ScoreTable {
    elements: Vec<f32>,
}

impl ScoreTable {
    /// Returns a table that the user's code can read on the CPU.
    pub(crate) fn new(elements: Vec<f32>) -> Self {
        Self { elements }
    }

    /// Returns the number of elements.
    pub(crate) fn count(&self) -> usize {
        self.elements.len()
    }

    /// Returns the element at `index`. An index past the end reads the last element, and a table without elements gives 0.
    pub fn at(&self, index: u32) -> f32 {
        let last = self.elements.len().saturating_sub(1);
        let element = self.elements.get(last.min(index as usize));
        element.copied().unwrap_or(0.0)
    }
}

/// A type whose code changes scores. The code is compiled into the kernels.
#[cfg_attr(feature = "cube", cube)]
#[allow(missing_docs, reason = "`#[cube]` adds functions without docs")]
pub trait ScoreMod: Send + Sync + 'static {
    /// True if [`score`](Self::score) ends with the addition or subtraction of a bias, as in `score + bias`. Kernels can
    /// then multiply by the scale and add the bias in one instruction. Set it only if every branch of the code ends so, and
    /// if the bias does not depend on `score`. Otherwise probabilities of large scores have rounding errors.
    const ADDS_BIAS: bool = false;

    /// Returns the changed score. `score` is `q·k` times the scale, after the softcap.
    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32;

    /// Returns the derivative of [`score`](Self::score) with respect to its argument `score`.
    fn derivative(score: f32, place: ScorePlace, table: &ScoreTable) -> f32;
}

/// A score mod whose table has a gradient. Each score depends on at most one element of the table that needs a
/// gradient.
///
/// Implement this trait in addition to [`ScoreMod`], and pass the type to
/// [`learned_score_mod`](crate::AttentionOptions::learned_score_mod).
#[cfg_attr(feature = "cube", cube)]
#[allow(missing_docs, reason = "`#[cube]` adds functions without docs")]
pub trait LearnedScoreMod: Send + Sync + 'static {
    /// True if [`element`](Self::element) and [`element_derivative`](Self::element_derivative) depend only on the head
    /// and on the distance. Tensor cores then compute the gradient, which is many times faster. Kernels pass 0 as the
    /// score, and any query and key with this distance.
    const OF_DISTANCE: bool = false;

    /// Returns the index of the table's element on which [`ScoreMod::score`] depends at `place`. An index past the end
    /// stands for the last element.
    fn element(place: ScorePlace, table: &ScoreTable) -> u32;

    /// Returns the derivative of [`ScoreMod::score`] with respect to this element. Return 0 for a score that depends on
    /// no element.
    fn element_derivative(score: f32, place: ScorePlace, table: &ScoreTable) -> f32;
}

/// A type whose code hides keys from queries. The code is compiled into the kernels.
#[cfg_attr(feature = "cube", cube)]
#[allow(missing_docs, reason = "`#[cube]` adds functions without docs")]
pub trait MaskMod: Send + Sync + 'static {
    /// Returns true if the query sees the key.
    fn visible(place: ScorePlace, table: &ScoreTable) -> bool;
}

/// The functions of a type that implements [`ScoreMod`].
#[derive(Clone, Copy)]
pub struct ScoreCode {
    name: &'static str,
    id: TypeId,
    /// [`ScoreMod::score`] on the CPU.
    pub(crate) score: fn(f32, ScorePlace, &ScoreTable) -> f32,
    /// [`ScoreMod::derivative`] on the CPU.
    pub(crate) derivative: fn(f32, ScorePlace, &ScoreTable) -> f32,
    #[cfg(feature = "cube")]
    pub(crate) expand_score: kernel::ExpandScore,
    #[cfg(feature = "cube")]
    pub(crate) expand_derivative: kernel::ExpandScore,
    /// [`ScoreMod::ADDS_BIAS`].
    #[cfg(feature = "cube")]
    pub(crate) adds_bias: bool,
    /// The functions for the gradient of the table, or `None` if the table has no gradient.
    pub(crate) learned: Option<LearnedCode>,
}

/// The functions of a type that implements [`LearnedScoreMod`].
#[derive(Clone, Copy)]
pub(crate) struct LearnedCode {
    /// [`LearnedScoreMod::element`] on the CPU.
    pub element: fn(ScorePlace, &ScoreTable) -> u32,
    /// [`LearnedScoreMod::element_derivative`] on the CPU.
    pub derivative: fn(f32, ScorePlace, &ScoreTable) -> f32,
    /// [`LearnedScoreMod::OF_DISTANCE`].
    pub of_distance: bool,
    #[cfg(feature = "cube")]
    pub expand_element: kernel::ExpandElement,
    #[cfg(feature = "cube")]
    pub expand_derivative: kernel::ExpandScore,
}

impl ScoreCode {
    /// Returns the functions of the score mod `M`.
    pub fn of<M: ScoreMod>() -> Self {
        Self {
            name: type_name::<M>(),
            id: TypeId::of::<M>(),
            score: M::score,
            derivative: M::derivative,
            #[cfg(feature = "cube")]
            expand_score: M::__expand_score,
            #[cfg(feature = "cube")]
            expand_derivative: M::__expand_derivative,
            #[cfg(feature = "cube")]
            adds_bias: M::ADDS_BIAS,
            learned: None,
        }
    }

    /// Returns the functions of the score mod `M`, whose table has a gradient.
    pub fn learned<M: ScoreMod + LearnedScoreMod>() -> Self {
        Self {
            learned: Some(LearnedCode {
                element: M::element,
                derivative: M::element_derivative,
                of_distance: M::OF_DISTANCE,
                #[cfg(feature = "cube")]
                expand_element: M::__expand_element,
                #[cfg(feature = "cube")]
                expand_derivative: M::__expand_element_derivative,
            }),
            ..Self::of::<M>()
        }
    }
}

/// The function of a type that implements [`MaskMod`].
#[derive(Clone, Copy)]
pub struct MaskCode {
    name: &'static str,
    id: TypeId,
    /// [`MaskMod::visible`] on the CPU.
    pub(crate) visible: fn(ScorePlace, &ScoreTable) -> bool,
    #[cfg(feature = "cube")]
    pub(crate) expand_visible: kernel::ExpandVisible,
}

impl MaskCode {
    /// Returns the function of the mask mod `M`.
    pub fn of<M: MaskMod>() -> Self {
        Self {
            name: type_name::<M>(),
            id: TypeId::of::<M>(),
            visible: M::visible,
            #[cfg(feature = "cube")]
            expand_visible: M::__expand_visible,
        }
    }
}

/// Implements `Eq`, `Hash` and `Debug` for a wrapper of a user's code. Two wrappers are equal if they hold the code of
/// the same Rust type. CubeCL uses these traits to look up compiled kernels.
macro_rules! by_type {
    ($code:ident) => {
        impl PartialEq for $code {
            fn eq(&self, other: &Self) -> bool {
                self.id == other.id
            }
        }

        impl Eq for $code {}

        impl Hash for $code {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.id.hash(state);
            }
        }

        impl fmt::Debug for $code {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name)
            }
        }
    };
}

by_type!(ScoreCode);
by_type!(MaskCode);
