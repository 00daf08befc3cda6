//! The factors of an adapter for the vision or the audio of a checkpoint, which become part of the weights.

use super::files::AdapterFiles;
use super::merge::Merger;
use crate::error::Gemma4Error;
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::Tensor,
};
use std::path::Path;

/// The names of a part of a checkpoint that sees images or hears audio.
#[derive(Clone, Copy)]
pub(crate) struct PartNames {
    /// A predicate that is true for the names of the part's tensors.
    pub is_part: fn(&str) -> bool,
    /// True if the part has no tower.
    pub is_projected: bool,
}

/// Checks that the adapter in `folder` fits the modules of the vision or the audio, without their weights.
///
/// # Errors
/// Returns an error if a file is malformed, or an error that lists all tensors that do not fit.
pub(crate) fn check_tower_adapter<M: Module>(
    folder: &Path,
    module: &M,
    names: PartNames,
) -> Result<(), Gemma4Error> {
    let files = AdapterFiles::open(folder)?;
    let mut reader = files.reader_of_part(names.is_part, names.is_projected)?;
    let mut matrices = Matrices::default();
    module.visit(&mut matrices);
    for (path, shape) in matrices.found {
        reader.factors(&path, shape);
    }
    reader.finish_part()
}

/// Adds the adapter in `folder` to the weights of the vision or the audio.
///
/// # Errors
/// Returns the errors of [`check_tower_adapter`].
pub(crate) fn merge_tower_adapter<M: Module>(
    folder: &Path,
    module: M,
    names: PartNames,
) -> Result<M, Gemma4Error> {
    let files = AdapterFiles::open(folder)?;
    let mut merger = Merger {
        reader: files.reader_of_part(names.is_part, names.is_projected)?,
        path: Vec::new(),
    };
    let merged = module.map(&mut merger);
    merger.reader.finish_part()?;
    Ok(merged)
}

/// A visitor that collects the paths and the shapes of all matrices.
#[derive(Default)]
struct Matrices {
    path: Vec<String>,
    found: Vec<(String, [usize; 2])>,
}

impl ModuleVisitor for Matrices {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let shape = <[usize; 2]>::try_from(param.lazy_shape().to_vec());
        if let (Some(path), Ok(shape)) = (path.strip_suffix(".weight"), shape) {
            self.found.push((path.to_owned(), shape));
        }
    }
}
