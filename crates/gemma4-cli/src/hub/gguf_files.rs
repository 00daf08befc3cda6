//! The GGUF files of a model on the Hub, and the choice of one by the memory of the device.

/// The parts of names by which files of types that burn-gemma4 refuses are told.
const UNSUPPORTED: [&str; 7] = ["IQ1_", "IQ2_", "IQ3_", "TQ1_", "TQ2_", "Q1_0", "NVFP4"];
/// The parts of names of files that belong to a model but are not the model: the encoder of images, the drafter, and
/// statistics for quantization.
const OTHERS: [&str; 4] = ["mmproj", "assistant", "drafter", "imatrix"];
/// The words in names of files without a model: adapters, control vectors and vocabularies. Other words may contain
/// them.
const OTHER_WORDS: [&str; 8] = [
    "lora", "qlora", "dora", "adapter", "adapters", "cvector", "vocab", "draft",
];
/// The bytes that stay free for the KV cache and activations.
const ACTIVATIONS: u64 = 1 << 30;
/// The types whose weights take more bytes on the device than in the file, in percent of the file. Kernels read codes
/// of 4 bits and more.
const GROWTH: [(&str, u64); 4] = [
    ("Q2_K", 177),
    ("Q3_K", 135),
    ("MXFP4", 118),
    ("IQ4_XS", 109),
];
/// The type that is taken if the device does not report its memory.
const USUAL: &str = "Q4_K_M";

/// One GGUF checkpoint, in one file or in several parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The paths in the repository, in the order of the parts.
    pub files: Vec<String>,
    pub bytes: u64,
}

impl Candidate {
    /// Returns the path of the first part, by which the checkpoint is loaded.
    pub fn path(&self) -> &str {
        &self.files[0]
    }

    fn has(&self, part: &str) -> bool {
        file_name(self.path())
            .to_uppercase()
            .contains(&part.to_uppercase())
    }

    /// True if the name has one of `words` between other characters than letters and digits.
    fn has_word(&self, words: &[&str]) -> bool {
        let name = file_name(self.path()).to_lowercase();
        name.split(|one: char| !one.is_alphanumeric())
            .any(|word| words.contains(&word))
    }

    /// Returns the number of bytes of the weights on the device.
    fn device_bytes(&self) -> u64 {
        let growth = GROWTH.iter().find(|(part, _)| self.has(part));
        self.bytes / 100 * growth.map_or(100, |(_, percent)| *percent)
    }

    /// True if a device with `memory` bytes has room for the weights, an eighth more, and activations.
    fn fits(&self, memory: u64) -> bool {
        let bytes = self.device_bytes();
        bytes.saturating_add(bytes / 8).saturating_add(ACTIVATIONS) <= memory
    }
}

/// Returns the GGUF checkpoints among the files, which come with their sizes in bytes. Incomplete checkpoints, files of
/// unsupported types, and files that are not models are left out.
pub(super) fn candidates(files: &[(String, u64)]) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (path, bytes) in files.iter().filter(|(path, _)| path.ends_with(".gguf")) {
        let candidate = match part(path) {
            None => Some(Candidate {
                files: vec![path.clone()],
                bytes: *bytes,
            }),
            Some((_, 1, _)) => with_parts(path, files),
            Some(_) => None,
        };
        let is_model = |candidate: &Candidate| {
            !UNSUPPORTED
                .iter()
                .chain(&OTHERS)
                .any(|part| candidate.has(part))
                && !candidate.has_word(&OTHER_WORDS)
        };
        found.extend(candidate.filter(is_model));
    }
    found
}

/// Returns the checkpoint that has the file `path`, with all its parts, or `None` if a part is missing.
pub(super) fn with_parts(path: &str, files: &[(String, u64)]) -> Option<Candidate> {
    let paths: Vec<String> = match part(path) {
        None => vec![path.to_owned()],
        Some((prefix, _, count)) => (1..=count)
            .map(|number| format!("{prefix}-{number:05}-of-{count:05}.gguf"))
            .collect(),
    };
    let bytes = |path: &String| {
        let file = files.iter().find(|(other, _)| other == path);
        file.map(|(_, bytes)| *bytes)
    };
    // Saturate, because the sizes come from the Hub.
    let bytes = paths
        .iter()
        .map(bytes)
        .try_fold(0, |sum: u64, bytes| Some(sum.saturating_add(bytes?)));
    Some(Candidate {
        bytes: bytes?,
        files: paths,
    })
}

/// Returns the prefix, the number and the count of a part's name, such as `model-00001-of-00003.gguf`.
fn part(path: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = path.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let read = |text: &str| -> Option<usize> {
        let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse().ok())?
    };
    let (number, count) = (read(number)?, read(count)?);
    (1..=count)
        .contains(&number)
        .then_some((prefix, number, count))
}

/// Chooses the largest checkpoint that fits into `memory` bytes. Returns the checkpoint, and the reason for the user.
///
/// # Errors
/// Returns the reason why no checkpoint was chosen.
pub(super) fn choose(
    candidates: &[Candidate],
    memory: Option<u64>,
) -> Result<(&Candidate, String), String> {
    let by_size = |candidate: &&Candidate| candidate.bytes;
    let Some(smallest) = candidates.iter().min_by_key(by_size) else {
        return Err("has no GGUF file of a supported type".into());
    };
    if let [only] = candidates {
        return Ok((only, "the only GGUF file of a supported type".into()));
    }
    let Some(memory) = memory else {
        let usual = candidates.iter().find(|candidate| candidate.has(USUAL));
        let reason = "the device does not report its memory";
        return Ok(match usual {
            Some(usual) => (usual, reason.into()),
            None => (smallest, format!("the smallest file, because {reason}")),
        });
    };
    let fitting = candidates.iter().filter(|candidate| candidate.fits(memory));
    match fitting.max_by_key(by_size) {
        Some(largest) => Ok((
            largest,
            format!("the largest file that fits {} of memory", gigabytes(memory)),
        )),
        None => Err(format!(
            "none of {} GGUF files fits {} of memory; the smallest, {}, has {}. Name a file to load it all the same",
            candidates.len(),
            gigabytes(memory),
            smallest.path(),
            gigabytes(smallest.bytes)
        )),
    }
}

/// Returns a size in GB, or in MB below 0.1 GB.
pub(super) fn gigabytes(bytes: u64) -> String {
    match bytes {
        100_000_000.. => format!("{:.1} GB", bytes as f64 / 1e9),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, u64)]) -> Vec<(String, u64)> {
        let gigabytes = |(path, size): &(&str, u64)| ((*path).to_owned(), size * 1_000_000_000);
        list.iter().map(gigabytes).collect()
    }

    #[test]
    fn part_numbers_begin_with_one() {
        assert_eq!(part("m-00001-of-00002.gguf"), Some(("m", 1, 2)));
        for name in [
            "m-00001-of-00000.gguf",
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
        ] {
            assert_eq!(part(name), None, "{name}");
            let found = with_parts(name, &[(name.into(), u64::MAX)]);
            assert_eq!(found.map(|found| found.files), Some(vec![name.to_owned()]));
        }
    }

    fn some() -> Vec<Candidate> {
        candidates(&files(&[
            ("README.md", 0),
            ("e2b-Q4_K_M.gguf", 3),
            ("e2b-Q8_0.gguf", 5),
            ("e2b-IQ2_XXS.gguf", 2),
            ("mmproj-F16.gguf", 1),
            ("imatrix.gguf", 1),
            ("e2b.imatrix.gguf", 1),
            ("e2b-LoRA-F16.gguf", 1),
            ("e2b_adapter.gguf", 1),
            ("ggml-vocab-gemma.gguf", 1),
            ("BF16/e2b-BF16-00001-of-00002.gguf", 5),
            ("BF16/e2b-BF16-00002-of-00002.gguf", 4),
            ("half-00001-of-00002.gguf", 4),
        ]))
    }

    #[test]
    fn candidates_join_parts_and_leave_out_other_files() {
        let names: Vec<(String, u64)> = some()
            .into_iter()
            .map(|candidate| (candidate.path().to_owned(), candidate.bytes / 1_000_000_000))
            .collect();
        let expected = [
            ("e2b-Q4_K_M.gguf", 3),
            ("e2b-Q8_0.gguf", 5),
            ("BF16/e2b-BF16-00001-of-00002.gguf", 9),
        ];
        let expected = expected.map(|(name, bytes)| (name.to_owned(), bytes));
        assert_eq!(names, expected);
    }

    #[test]
    fn candidates_keep_models_whose_names_contain_a_word() {
        let list = files(&[("flora-Q4_0.gguf", 1), ("drafted-Q4_0.gguf", 1)]);
        assert_eq!(candidates(&list).len(), 2);
    }

    #[test]
    fn choose_takes_the_largest_file_that_fits() {
        let all = some();
        for (memory, expected) in [(24, 2), (11, 1), (8, 1), (6, 0)] {
            let memory = memory * 1_000_000_000;
            let (found, reason) = choose(&all, Some(memory)).expect("a file fits");
            assert_eq!(found, &all[expected], "{memory}");
            assert!(reason.contains("largest"), "{reason}");
        }
        let error = choose(&all, Some(4_000_000_000)).expect_err("no file fits");
        assert!(error.contains("e2b-Q4_K_M.gguf, has 3.0 GB"), "{error}");
        // A file of Q2_K takes 3.5 GB on the device, and would not leave an eighth of 4.8 GB.
        let small = candidates(&files(&[("a-Q2_K.gguf", 2), ("b-Q4_0.gguf", 1)]));
        let (found, _) = choose(&small, Some(4_800_000_000)).expect("a file fits");
        assert_eq!(found, &small[1]);
        assert_eq!(choose(&all, None).expect("a file is usual").0, &all[0]);
        assert_eq!(
            choose(&all[1..], None).expect("a file is smallest").0,
            &all[1]
        );
        assert_eq!(
            choose(&all[2..], Some(1)).expect("one file is there").0,
            &all[2]
        );
        assert!(choose(&[], None).is_err());
    }
}
