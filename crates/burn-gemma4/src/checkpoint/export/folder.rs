//! Writes a quantized checkpoint as a folder. The folder's weights are in the packed format of compressed-tensors.

use super::{Export, QuantizedCheckpoint, options::ExportForm};
use crate::checkpoint::files::TensorFiles;
use crate::checkpoint::packed::{SCALES, SHAPE, WORDS};
use crate::checkpoint::save::{
    copy_beside, dtype_in_file, folder_of, partial_folder, write_file, write_tensors,
};
use crate::checkpoint::source::{Source, WeightSource};
use crate::error::Gemma4Error;
use crate::quant::packed::Scheme;
use crate::quant::rows::written;
use burn::tensor::DType;
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// The group size of the quantization: the number of consecutive columns of a row that share a scale.
const GROUP: usize = 32;
/// The matrices that stay unquantized in an exported folder: the embedding tables and the output projection.
pub(super) const TABLES: [&str; 3] = [
    "embed_tokens.weight",
    "embed_tokens_per_layer.weight",
    "lm_head.weight",
];
/// The tensors that stack the matrices of all experts. An entry holds the suffix of the stacked tensor's name, and the
/// names of one expert's matrices in this tensor. Each expert's rows in the stacked tensor are the rows of these
/// matrices, in the order of the names.
const OF_EXPERTS: [(&str, &[&str]); 2] = [
    (".experts.gate_up_proj", &["gate_proj", "up_proj"]),
    (".experts.down_proj", &["down_proj"]),
];

/// A tensor that is written to the file.
struct Part<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    read: Box<dyn Fn() -> Cow<'a, [u8]> + 'a>,
}

impl View for Part<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (self.read)()
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A matrix that is written in packed form.
struct Matrix<'a> {
    /// The name of the matrix's module in the written file.
    name: String,
    source: Source<'a>,
    /// The matrix's position in a tensor that stacks the matrices of all experts: the expert's index, and the range of
    /// the expert's rows that belong to the matrix. `None` if the source holds only this matrix.
    place: Option<(usize, Range<usize>)>,
    rows: usize,
    columns: usize,
}

impl Matrix<'_> {
    /// Reads all elements of the matrix in f32, row by row.
    fn numbers(&self) -> Vec<f32> {
        match &self.place {
            None => self
                .source
                .slices(0..self.rows, DType::F32)
                .iter()
                .collect(),
            Some((slice, rows)) => {
                let slice = self.source.slices(*slice..slice + 1, DType::F32);
                let numbers = slice.iter::<f32>().skip(rows.start * self.columns);
                numbers.take(rows.len() * self.columns).collect()
            }
        }
    }

    /// Returns the number of bytes that the matrix occupies in the source.
    fn bytes(&self) -> usize {
        self.source.len() / self.source.shape.iter().product::<usize>() * self.rows * self.columns
    }
}

impl Export<'_> {
    pub(super) fn write_folder(
        &self,
        files: &TensorFiles,
        to: &Path,
    ) -> Result<QuantizedCheckpoint, Gemma4Error> {
        let failed = |source| Gemma4Error::Io {
            path: to.into(),
            source,
        };
        let partial = partial_folder().tempdir_in(folder_of(to)).map_err(failed)?;
        self.finish(self.fill(files, partial.path()))?;
        fs::rename(partial.path(), to).map_err(failed)?;
        // The folder has been renamed from its temporary path to its final name. `keep` stops `partial` from deleting
        // the temporary path, which no longer exists.
        let _ = partial.keep();
        Ok(self.written(&to.join("model.safetensors"), Vec::new()))
    }

    fn fill(&self, files: &TensorFiles, folder: &Path) -> Result<(), Gemma4Error> {
        let entries = files.names().filter_map(|name| files.get(name));
        let total_bytes = entries.map(|entry| files.bytes(entry).len()).sum();
        self.report.borrow_mut().total_bytes = total_bytes;
        let matrices = self.matrices();
        let packed: BTreeSet<String> = matrices
            .iter()
            .map(|(path, _)| path)
            .flat_map(|path| self.weights.names(path))
            .collect();
        let mut tensors: BTreeMap<String, Part<'_>> = BTreeMap::new();
        let mut ignored = BTreeSet::from(["lm_head".to_owned()]);
        for name in files.names().filter(|name| !packed.contains(*name)) {
            if let Some(entry) = files.get(name) {
                if let (Some(module), 2) = (name.strip_suffix(".weight"), entry.shape.len()) {
                    ignored.insert(module.to_owned());
                }
                let read = move || {
                    let bytes = files.bytes(entry);
                    self.is_written(name, bytes.len());
                    Cow::Borrowed(bytes)
                };
                let part = Part {
                    dtype: entry.dtype,
                    shape: entry.shape.clone(),
                    read: Box::new(read),
                };
                tensors.insert(name.to_owned(), part);
            }
        }
        for (_, matrix) in matrices {
            tensors.extend(self.parts(matrix));
        }
        write_tensors(&folder.join("model.safetensors"), None, tensors.into_iter())?;
        let config = self.packed_config(ignored)?;
        write_file(&folder.join("config.json"), config.as_bytes())?;
        copy_beside(self.from, folder)
    }

    fn scheme(&self) -> Scheme {
        Scheme {
            bits: match self.options.form {
                ExportForm::Q8 => 8,
                _ => 4,
            },
            group: Some(GROUP),
            is_symmetric: true,
        }
    }

    /// Returns the matrices to pack, each with the path of its parameter.
    fn matrices(&self) -> Vec<(String, Matrix<'_>)> {
        let mut matrices = Vec::new();
        for (path, shape) in &self.parameters {
            if self.format(path).is_none() {
                continue;
            }
            let name = self.weights.in_file(path);
            match shape[..] {
                [rows, columns] => {
                    let matrix = Matrix {
                        name: name.trim_end_matches(".weight").into(),
                        source: self.source(path),
                        place: None,
                        rows,
                        columns,
                    };
                    matrices.push((path.clone(), matrix));
                }
                _ => {
                    let of_experts = self.of_experts(path, &name, shape).into_iter();
                    matrices.extend(of_experts.map(|matrix| (path.clone(), matrix)));
                }
            }
        }
        // Pack K and V projections even for layers that do not use them. Some loaders fuse all projections of a layer,
        // and refuse a layer in which only some projections are packed.
        for path in self.weights.unread(self.config) {
            let Ok(source) = self.weights.get(&path) else {
                continue;
            };
            // Pack the matrix only if its row length is a multiple of the group size. No layer uses this matrix, so no
            // earlier code has checked the row length.
            if let [rows, columns] = source.shape[..]
                && columns.is_multiple_of(GROUP)
                && rows * columns > 0
            {
                let matrix = Matrix {
                    name: self
                        .weights
                        .in_file(&path)
                        .trim_end_matches(".weight")
                        .into(),
                    source,
                    place: None,
                    rows,
                    columns,
                };
                matrices.push((path, matrix));
            }
        }
        matrices
    }

    /// Returns the matrices of all experts that the parameter at `path` stacks in one tensor. Returns an empty list if
    /// the parameter does not stack experts' matrices.
    fn of_experts(&self, path: &str, name: &str, shape: &[usize]) -> Vec<Matrix<'_>> {
        let mut matrices = Vec::new();
        let found = OF_EXPERTS
            .iter()
            .find_map(|(stack, parts)| Some((name.strip_suffix(stack)?, parts)));
        let (Some((layer, parts)), [experts, rows, columns]) = (found, shape) else {
            return matrices;
        };
        let rows = rows / parts.len();
        for expert in 0..*experts {
            for (index, part) in parts.iter().enumerate() {
                matrices.push(Matrix {
                    name: format!("{layer}.experts.{expert}.{part}"),
                    source: self.source(path),
                    place: Some((expert, index * rows..(index + 1) * rows)),
                    rows,
                    columns: *columns,
                });
            }
        }
        matrices
    }

    /// Returns the three tensors that store a packed matrix: the 32-bit words with the codes, the scales, and the shape.
    fn parts<'a>(&'a self, matrix: Matrix<'a>) -> [(String, Part<'a>); 3] {
        let scheme = self.scheme();
        let dtype = match self.dtype {
            DType::F64 => DType::F32,
            dtype => dtype,
        };
        let (rows, columns) = (matrix.rows, matrix.columns);
        let groups = columns / GROUP;
        let words = scheme.words(columns);
        let named = |part: &str| format!("{}.{part}", matrix.name);
        let names = [WORDS, SCALES, SHAPE].map(named);
        let matrix = std::rc::Rc::new(matrix);
        let scales_of_row = groups * dtype.size();
        // Quantize each row twice: once to write the packed codes, and once to write the scales. The host then never
        // holds the codes and the scales of a matrix at the same time.
        let row = move |numbers: &[f32], row: usize, scales: &mut [u8], words: &mut [u8]| {
            scheme.pack(&numbers[row * columns..][..columns], dtype, scales, words)
        };
        let of_words = {
            let matrix = matrix.clone();
            move || {
                let numbers = matrix.numbers();
                let are_numbers = AtomicBool::new(true);
                let space = || vec![0; scales_of_row];
                let bytes = written(0..rows, words * 4, space, |at, scales, bytes| {
                    if !row(&numbers, at, scales, bytes) {
                        are_numbers.store(false, Ordering::Relaxed);
                    }
                });
                if !are_numbers.load(Ordering::Relaxed) {
                    self.is_no_number(&matrix.name);
                }
                self.is_written(&matrix.name, matrix.bytes());
                Cow::Owned(bytes)
            }
        };
        let of_scales = move || {
            let numbers = matrix.numbers();
            let space = || vec![0; words * 4];
            Cow::Owned(written(
                0..rows,
                scales_of_row,
                space,
                |at, words, bytes| {
                    row(&numbers, at, bytes, words);
                },
            ))
        };
        let of_shape = move || {
            Cow::Owned(
                [rows, columns]
                    .map(|size| (size as i64).to_le_bytes())
                    .concat(),
            )
        };
        let parts = [
            Part {
                dtype: Dtype::I32,
                shape: vec![rows, words],
                read: Box::new(of_words),
            },
            Part {
                dtype: dtype_in_file(dtype),
                shape: vec![rows, groups],
                read: Box::new(of_scales),
            },
            Part {
                dtype: Dtype::I64,
                shape: vec![2],
                read: Box::new(of_shape),
            },
        ];
        let mut parts = parts.into_iter();
        names.map(|name| (name, parts.next().expect("one part per name")))
    }

    /// Returns the text of the `config.json` to write: the source's text with an added description of the quantization.
    fn packed_config(&self, ignored: BTreeSet<String>) -> Result<String, Gemma4Error> {
        let malformed = |error: serde_json::Error| Gemma4Error::Config(error.to_string());
        let mut json: Value = serde_json::from_str(self.json).map_err(malformed)?;
        json["quantization_config"] = json!({
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": self.scheme().bits,
                    "type": "int",
                    "symmetric": true,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": false,
                },
                "input_activations": null,
                "output_activations": null,
                "format": "pack-quantized",
            }},
            "format": "pack-quantized",
            "global_compression_ratio": null,
            "ignore": ignored,
            "kv_cache_scheme": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        });
        Ok(format!("{json:#}\n"))
    }
}
