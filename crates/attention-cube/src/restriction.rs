//! A device made less than it is, for tests: engines and tiles that it would not choose by itself run on it all the same.
//!
//! `ATTENTION_ENGINES` names the engines that may serve, such as `unit` or `wgmma,unit`; the reference, which serves everything, comes last
//! in any case. `ATTENTION_SHARED_MEMORY` is the bytes of shared memory that a cube may take at most, such as 101376, which are a
//! consumer card's. `ATTENTION_FRAGMENTS` is what planes multiply: `device` for what the device has, which is right on one H100 and one H200 and has been seen on no other;
//! `none`; or a shape, which is then emulated, such as `16x16x16`, or `8x8x8:f32` for operands that are widened. All are read once, when a
//! device is first asked.

use crate::device::FragmentSupport;
use crate::engine::Engine;
use crate::tile::fragment_tiles::Fragments;
use burn::tensor::DType;
use std::env;
use std::sync::OnceLock;

/// The restriction of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Restriction {
    /// The engines that may serve, if not all.
    engines: Option<Vec<Engine>>,
    shared_memory: Option<usize>,
    /// What planes multiply.
    fragments: Option<Asked>,
}

/// The fragments that are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    /// The device's own.
    Device,
    /// In place of these: none, or emulated ones.
    These(Vec<Fragments>),
}

/// Why a device's own fragments are not taken unless they are asked for.
const UNTRIED: &str = "its products have run on few matrix units yet; ATTENTION_FRAGMENTS=device has it take this device's";

/// Units of a plane that emulates a product of `m × n` elements: a vector of 4 of them for each, but of the sizes that planes have.
fn emulated_plane(fragments: &Fragments) -> usize {
    match fragments.m * fragments.n / 4 {
        0..=32 => 32,
        _ => 64,
    }
}

impl Restriction {
    /// What the environment says.
    ///
    /// # Panics
    /// Where it says what is no list of engines, or no number: a test would prove nothing.
    pub(crate) fn of_environment() -> &'static Self {
        static RESTRICTION: OnceLock<Restriction> = OnceLock::new();
        RESTRICTION.get_or_init(|| {
            let variable = |name| env::var(name).ok();
            Self::parse(
                variable("ATTENTION_ENGINES").as_deref(),
                variable("ATTENTION_SHARED_MEMORY").as_deref(),
                variable("ATTENTION_FRAGMENTS").as_deref(),
            )
            .unwrap_or_else(|error| panic!("{error}"))
        })
    }

    fn parse(
        engines: Option<&str>,
        shared_memory: Option<&str>,
        fragments: Option<&str>,
    ) -> Result<Self, String> {
        let engine = |word: &str| {
            let known = || {
                Engine::WITH_KERNELS
                    .iter()
                    .chain(&[Engine::Reference])
                    .copied()
            };
            let is_named = |engine: &Engine| engine.to_string().eq_ignore_ascii_case(word.trim());
            known().find(is_named).ok_or_else(|| {
                let names = Vec::from_iter(known().map(|engine| engine.to_string()));
                format!("ATTENTION_ENGINES: {word:?} is none of {names:?}")
            })
        };
        let engines = engines.map(|list| list.split(',').map(engine).collect());
        let bytes = |text: &str| {
            text.parse()
                .map_err(|error| format!("ATTENTION_SHARED_MEMORY: {text:?}: {error}"))
        };
        Ok(Self {
            engines: engines.transpose()?,
            shared_memory: shared_memory.map(bytes).transpose()?,
            fragments: fragments.map(parse_fragments).transpose()?,
        })
    }

    /// Engines that are left out.
    pub(crate) fn left_out(&self) -> Vec<Engine> {
        match &self.engines {
            Some(engines) => {
                let left_out = |engine: &&Engine| !engines.contains(engine);
                Engine::WITH_KERNELS
                    .iter()
                    .filter(left_out)
                    .copied()
                    .collect()
            }
            None => Vec::new(),
        }
    }

    /// What planes multiply, on a device that has what it `own`s.
    pub(crate) fn fragments(&self, own: impl FnOnce() -> FragmentSupport) -> FragmentSupport {
        match &self.fragments {
            Some(Asked::These(kinds)) => {
                let plane = kinds.first().map_or(0, emulated_plane);
                FragmentSupport {
                    kinds: kinds.clone(),
                    plane_sizes: (plane, plane),
                    fault: None,
                }
            }
            Some(Asked::Device) => own(),
            None => {
                let own = own();
                let fault = own.fault.or(Some(UNTRIED));
                FragmentSupport { fault, ..own }
            }
        }
    }

    /// Of a device's shared memory, what may be taken.
    pub(crate) fn shared_memory(&self, bytes: usize) -> usize {
        self.shared_memory.map_or(bytes, |most| most.min(bytes))
    }
}

/// The device's, nothing, or the emulated fragments of a shape, of f16 and of bf16, or of f32.
fn parse_fragments(text: &str) -> Result<Asked, String> {
    let wrong =
        || format!("ATTENTION_FRAGMENTS: {text:?} is neither device nor none nor like 16x16x16");
    match text.trim() {
        "device" => return Ok(Asked::Device),
        "none" => return Ok(Asked::These(Vec::new())),
        _ => (),
    }
    let (shape, dtypes): (_, &[DType]) = match text.trim().strip_suffix(":f32") {
        Some(shape) => (shape, &[DType::F32]),
        None => (text.trim(), &[DType::F16, DType::BF16]),
    };
    let sizes: Result<Vec<usize>, _> = shape.split('x').map(str::parse).collect();
    let [m, n, k] = sizes
        .ok()
        .and_then(|sizes| <[usize; 3]>::try_from(sizes).ok())
        .ok_or_else(wrong)?;
    let kinds = dtypes.iter().map(|dtype| Fragments {
        m,
        n,
        k,
        dtype: *dtype,
        emulated: true,
    });
    Ok(Asked::These(kinds.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_and_bytes() {
        let none = Restriction::parse(None, None, None).expect("nothing is restricted");
        assert_eq!((none.left_out(), none.shared_memory(9)), (vec![], 9));
        let some =
            Restriction::parse(Some("unit, reference"), Some("7"), None).expect("two engines");
        let others = Engine::WITH_KERNELS.iter().copied();
        let others = Vec::from_iter(others.filter(|engine| *engine != Engine::Unit));
        assert_eq!(some.left_out(), others);
        assert_eq!((some.shared_memory(9), some.shared_memory(5)), (7, 5));
        for (engines, bytes, fragments) in [
            (Some("units"), None, None),
            (Some(""), None, None),
            (None, Some("99 KB"), None),
            (None, None, Some("")),
            (None, None, Some("16x16")),
            (None, None, Some("8x8x8:f64")),
        ] {
            Restriction::parse(engines, bytes, fragments).expect_err("a test would prove nothing");
        }
    }

    #[test]
    fn fragments_are_the_devices_none_or_emulated() {
        let own = || FragmentSupport {
            plane_sizes: (64, 64),
            ..FragmentSupport::default()
        };
        let of = |text| {
            let restriction = Restriction::parse(None, None, text).expect("a shape, or none");
            restriction.fragments(own)
        };
        assert_eq!(of(Some("device")), own());
        assert_eq!(of(None).fault, Some(UNTRIED));
        assert_eq!(of(Some("none")).kinds, []);
        let emulated = |dtype| Fragments {
            m: 16,
            n: 8,
            k: 4,
            dtype,
            emulated: true,
        };
        let halves = [DType::F16, DType::BF16].map(emulated);
        assert_eq!(of(Some("16x8x4")).kinds, halves);
        assert_eq!(of(Some("16x8x4:f32")).kinds, [emulated(DType::F32)]);
    }
}
