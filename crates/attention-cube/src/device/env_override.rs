//! Environment variables that restrict a device's profile. With these variables, tests can use engines and tiles that
//! would not be chosen on the device.
//!
//! - `ATTENTION_ENGINES` lists the enabled engines, such as `unit` or `wgmma,unit`. The engine `blocks` is always
//!   enabled as the last engine.
//! - `ATTENTION_SHARED_MEMORY` limits the bytes of shared memory per cube, for example to 101376 as on a consumer GPU.
//! - `ATTENTION_FRAGMENTS` selects the support for cmma, CubeCL's matrix multiplication by planes (warps). Without the
//!   variable, engines use a device's own cmma in tiles that passed the self-check. `device` enables the device's own
//!   cmma without a check. `none` disables cmma. A shape such as `16x16x16` emulates cmma of that shape. A shape with
//!   `:f32`, such as `8x8x8:f32`, emulates cmma with f32 operands. The last suffix `:checked` runs the self-check on
//!   the emulated cmma. The last suffixes `:swapped`, `:short`, `:first-tile` and `:upper-rows` do so too, and the
//!   products are wrong.
//!
//! Each variable is read once, when the first device is queried.

use crate::types::device::{Emulation, FragmentSupport, Fragments};
use crate::types::engine::Engine;
use crate::types::fragment_verdict::FragmentVerdicts;
use burn::tensor::DType;
use std::env;
use std::sync::OnceLock;

/// The overrides that this process's environment variables specify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceOverride {
    /// The enabled engines, or `None` if all engines are enabled.
    engines: Option<Vec<Engine>>,
    shared_memory: Option<usize>,
    /// The cmma support that `ATTENTION_FRAGMENTS` selects. If the variable is not set (`None`), engines use the
    /// device's own cmma after a self-check.
    fragments: Option<FragmentOverride>,
}

/// The cmma support that `ATTENTION_FRAGMENTS` selects.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FragmentOverride {
    /// The device's own support of cmma, CubeCL's matrix multiplication by planes (warps).
    Device,
    /// Emulated shapes, which replace the shapes of the device. An empty list disables cmma.
    Emulated {
        kinds: Vec<Fragments>,
        /// True if engines use the emulated shapes only after the self-check.
        is_checked: bool,
    },
}

/// The suffixes of an emulated shape that turn the self-check on, each with the results of the products.
const CHECKED: [(&str, Emulation); 5] = [
    (":checked", Emulation::Exact),
    (":swapped", Emulation::Swapped),
    (":short", Emulation::Short),
    (":first-tile", Emulation::FirstTile),
    (":upper-rows", Emulation::UpperRows),
];

/// Returns the plane size (units per plane) of a device that emulates cmma. The size is 32 if an `m × n` accumulator
/// has at most 32 vectors of 4 elements, and 64 otherwise.
fn emulated_plane(fragments: &Fragments) -> usize {
    match fragments.m * fragments.n / 4 {
        0..=32 => 32,
        _ => 64,
    }
}

impl DeviceOverride {
    /// Reads the overrides from the environment variables.
    ///
    /// # Panics
    /// Panics if a variable is malformed.
    pub(crate) fn of_environment() -> &'static Self {
        static RESTRICTION: OnceLock<DeviceOverride> = OnceLock::new();
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
                    .chain(&[Engine::Blocks])
                    .copied()
            };
            let is_named = |engine: &Engine| engine.to_string().eq_ignore_ascii_case(word.trim());
            known().find(is_named).ok_or_else(|| {
                let names = Vec::from_iter(known().map(|engine| engine.to_string()));
                format!("ATTENTION_ENGINES: {word:?} is unknown; expected one of {names:?}")
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

    /// Returns the engines that selection must skip.
    pub(crate) fn disabled_engines(&self) -> Vec<Engine> {
        match &self.engines {
            Some(engines) => {
                let is_disabled = |engine: &&Engine| !engines.contains(engine);
                Engine::WITH_KERNELS
                    .iter()
                    .filter(is_disabled)
                    .copied()
                    .collect()
            }
            None => Vec::new(),
        }
    }

    /// Returns the cmma support of the device under this override. The closure `own` returns the device's own support.
    pub(crate) fn fragments(&self, own: impl FnOnce() -> FragmentSupport) -> FragmentSupport {
        match &self.fragments {
            Some(FragmentOverride::Emulated { kinds, is_checked }) => {
                let plane = kinds.first().map_or(0, emulated_plane);
                FragmentSupport {
                    kinds: kinds.clone(),
                    plane_sizes: (plane, plane),
                    fault: None,
                    verdicts: is_checked.then(FragmentVerdicts::default),
                }
            }
            Some(FragmentOverride::Device) => own(),
            None => FragmentSupport {
                verdicts: Some(FragmentVerdicts::default()),
                ..own()
            },
        }
    }

    /// Returns the bytes of shared memory that a cube may allocate on a device whose own limit is `bytes`.
    pub(crate) fn shared_memory(&self, bytes: usize) -> usize {
        self.shared_memory.map_or(bytes, |most| most.min(bytes))
    }
}

/// Parses `device`, `none`, or a shape to emulate. The suffix `:f32` selects f32 operands instead of f16 and bf16. A
/// suffix of `CHECKED` follows it.
fn parse_fragments(text: &str) -> Result<FragmentOverride, String> {
    let wrong =
        || format!("ATTENTION_FRAGMENTS: {text:?} is invalid; use device, none or 16x16x16");
    match text.trim() {
        "device" => return Ok(FragmentOverride::Device),
        "none" => {
            return Ok(FragmentOverride::Emulated {
                kinds: Vec::new(),
                is_checked: false,
            });
        }
        _ => (),
    }
    let checked = CHECKED.iter().find_map(|(suffix, emulation)| {
        let shape = text.trim().strip_suffix(suffix)?;
        Some((shape, *emulation))
    });
    let (shape, emulation) = checked.unwrap_or((text.trim(), Emulation::Exact));
    let (shape, dtypes): (_, &[DType]) = match shape.strip_suffix(":f32") {
        Some(shape) => (shape, &[DType::F32]),
        None => (shape, &[DType::F16, DType::BF16]),
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
        emulation: Some(emulation),
    });
    Ok(FragmentOverride::Emulated {
        kinds: kinds.collect(),
        is_checked: checked.is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_engines_and_bytes_restricts_the_device() {
        let none = DeviceOverride::parse(None, None, None).expect("no variable is valid");
        assert_eq!(
            (none.disabled_engines(), none.shared_memory(9)),
            (vec![], 9)
        );
        let some = DeviceOverride::parse(Some("unit, blocks"), Some("7"), None)
            .expect("the engine names and the number are valid");
        let others = Engine::WITH_KERNELS.iter().copied();
        let others = Vec::from_iter(others.filter(|engine| *engine != Engine::Unit));
        assert_eq!(some.disabled_engines(), others);
        assert_eq!((some.shared_memory(9), some.shared_memory(5)), (7, 5));
        for (engines, bytes, fragments) in [
            (Some("units"), None, None),
            (Some(""), None, None),
            (None, Some("99 KB"), None),
            (None, None, Some("")),
            (None, None, Some("16x16")),
            (None, None, Some("8x8x8:f64")),
            (None, None, Some("8x8x8:wrong")),
            (None, None, Some("8x8x8:checked:f32")),
        ] {
            DeviceOverride::parse(engines, bytes, fragments)
                .expect_err("a malformed variable is an error");
        }
    }

    #[test]
    fn fragments_by_override_are_own_none_or_emulated() {
        let own = || FragmentSupport {
            plane_sizes: (64, 64),
            ..FragmentSupport::default()
        };
        let of = |text| {
            let restriction =
                DeviceOverride::parse(None, None, text).expect("the override is valid");
            restriction.fragments(own)
        };
        assert_eq!(of(Some("device")), own());
        assert_eq!(of(None).verdicts, Some(FragmentVerdicts::default()));
        assert_eq!(of(Some("none")).kinds, []);
        let emulated = |emulation| {
            move |dtype| Fragments {
                m: 16,
                n: 8,
                k: 4,
                dtype,
                emulation: Some(emulation),
            }
        };
        let exact = [DType::F16, DType::BF16].map(emulated(Emulation::Exact));
        let support = of(Some("16x8x4"));
        assert_eq!((&support.kinds[..], support.verdicts), (&exact[..], None));
        let support = of(Some("16x8x4:checked"));
        let unchecked = Some(FragmentVerdicts::default());
        assert_eq!(
            (&support.kinds[..], &support.verdicts),
            (&exact[..], &unchecked)
        );
        let support = of(Some("16x8x4:f32:short"));
        assert_eq!(support.kinds, [emulated(Emulation::Short)(DType::F32)]);
        assert_eq!(support.verdicts, unchecked);
    }
}
