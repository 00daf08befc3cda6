//! A device made less than it is, for tests: engines and tiles that it would not choose by itself run on it all the same.
//!
//! `ATTENTION_ENGINES` names the engines that may serve, such as `unit` or `wgmma,unit`; the reference, which serves everything, comes last
//! in any case. `ATTENTION_SHARED_MEMORY` is the bytes of shared memory that a cube may take at most, such as 101376, which are a
//! consumer card's. Both are read once, when a device is first asked.

use crate::engine::Engine;
use std::env;
use std::sync::OnceLock;

/// The restriction of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Restriction {
    /// The engines that may serve, if not all.
    engines: Option<Vec<Engine>>,
    shared_memory: Option<usize>,
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
            )
            .unwrap_or_else(|error| panic!("{error}"))
        })
    }

    fn parse(engines: Option<&str>, shared_memory: Option<&str>) -> Result<Self, String> {
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

    /// Of a device's shared memory, what may be taken.
    pub(crate) fn shared_memory(&self, bytes: usize) -> usize {
        self.shared_memory.map_or(bytes, |most| most.min(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_and_bytes() {
        let none = Restriction::parse(None, None).expect("nothing is restricted");
        assert_eq!((none.left_out(), none.shared_memory(9)), (vec![], 9));
        let some = Restriction::parse(Some("unit, reference"), Some("7")).expect("two engines");
        let others = Engine::WITH_KERNELS.iter().copied();
        let others = Vec::from_iter(others.filter(|engine| *engine != Engine::Unit));
        assert_eq!(some.left_out(), others);
        assert_eq!((some.shared_memory(9), some.shared_memory(5)), (7, 5));
        for (engines, bytes) in [
            (Some("units"), None),
            (Some(""), None),
            (None, Some("99 KB")),
        ] {
            Restriction::parse(engines, bytes).expect_err("a test would prove nothing");
        }
    }
}
