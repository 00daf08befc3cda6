//! The verdicts of the self-check of a device's matrix multiplications on fragments (cmma).

use super::refusal::Refusal;
use super::request::Pass;
use burn::tensor::DType;
use std::fmt;
use std::path::PathBuf;

/// The tiles that one run of the self-check covers: the tiles of all matrix multiplications of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileCheck {
    /// The pass whose kernels use the tiles.
    pub pass: Pass,
    /// The dtype of the query, the keys and the values.
    pub dtype: DType,
    /// All sizes of the tiles, as text. Two tiles with the same text compile to the same matrix multiplications.
    pub tiles: String,
}

/// The result of the self-check of some tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FragmentVerdict {
    /// The results are right.
    Passed {
        /// The speed as a percentage of the unit engine's speed, or `None` if no speed was measured.
        speed_percent: Option<u32>,
    },
    /// The tiles must not be used. The text gives the reason.
    Refused(String),
}

/// The verdicts that this process has obtained on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FragmentVerdicts {
    /// The verdicts, in the order in which the process obtained them.
    pub known: Vec<(TileCheck, FragmentVerdict)>,
    /// The file that keeps the verdicts for later processes. `None` if no check ran so far, or if the process cannot
    /// write the file.
    pub file: Option<PathBuf>,
}

impl FragmentVerdicts {
    /// Returns the verdict on some tiles, or `None` if this process has not obtained the verdict yet.
    pub fn of(&self, check: &TileCheck) -> Option<&FragmentVerdict> {
        let mut known = self.known.iter();
        known
            .find(|(known, _)| known == check)
            .map(|(_, verdict)| verdict)
    }

    /// Returns a refusal if the tiles failed the self-check, or if the self-check has not run yet.
    pub(crate) fn require(&self, check: TileCheck) -> Result<(), Refusal> {
        match self.of(&check) {
            Some(FragmentVerdict::Passed { .. }) => Ok(()),
            Some(FragmentVerdict::Refused(reason)) => Err(Refusal::Fault(reason.clone().into())),
            None => Err(Refusal::Unchecked(Box::new(check))),
        }
    }

    /// Returns a text for each verdict, and one for the file that keeps the verdicts.
    pub fn lines(&self) -> Vec<String> {
        let verdict =
            |(check, verdict): &(TileCheck, FragmentVerdict)| format!("cmma, {check}: {verdict}");
        let mut lines: Vec<_> = self.known.iter().map(verdict).collect();
        if lines.is_empty() {
            lines.push("cmma: not checked, because no problem has needed a check so far".into());
        }
        if let Some(file) = &self.file {
            lines.push(format!(
                "verdicts of cmma are kept in {}; delete the file to check again",
                file.display()
            ));
        }
        lines
    }
}

impl fmt::Display for TileCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        write!(f, "{pass} in {:?} ({})", self.dtype, self.tiles)
    }
}

impl fmt::Display for FragmentVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed {
                speed_percent: Some(percent),
            } => write!(f, "passed, at {percent} % of the unit engine's speed"),
            Self::Passed {
                speed_percent: None,
            } => f.write_str("passed; speed not measured"),
            Self::Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(dtype: DType) -> TileCheck {
        TileCheck {
            pass: Pass::Forward,
            dtype,
            tiles: "some".into(),
        }
    }

    #[test]
    fn require_without_verdict_is_unchecked() {
        let mut verdicts = FragmentVerdicts::default();
        let passed = FragmentVerdict::Passed {
            speed_percent: Some(310),
        };
        verdicts.known.push((check(DType::F16), passed));
        assert_eq!(verdicts.require(check(DType::F16)), Ok(()));
        let unchecked = Refusal::Unchecked(Box::new(check(DType::BF16)));
        assert_eq!(verdicts.require(check(DType::BF16)), Err(unchecked));
        let wrong = FragmentVerdict::Refused("wrong".into());
        verdicts.known.push((check(DType::BF16), wrong));
        let fault = Refusal::Fault("wrong".into());
        assert_eq!(verdicts.require(check(DType::BF16)), Err(fault));
    }

    #[test]
    fn lines_name_verdicts_and_file() {
        let mut verdicts = FragmentVerdicts::default();
        let lines = verdicts.lines();
        assert!(lines[0].contains("not checked"), "{lines:?}");
        let passed = FragmentVerdict::Passed {
            speed_percent: Some(310),
        };
        verdicts.known.push((check(DType::F16), passed));
        verdicts.file = Some("/cache/file.json".into());
        assert_eq!(
            verdicts.lines(),
            [
                "cmma, forward in F16 (some): passed, at 310 % of the unit engine's speed",
                "verdicts of cmma are kept in /cache/file.json; delete the file to check again",
            ]
        );
    }
}
