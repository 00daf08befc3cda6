//! Chooses device memory or host memory for the per-layer embedding table while a checkpoint is loaded.

use super::host_table::host_table;
use super::loader::{Expected, Loader, WeightForm};
use super::source::{PORTION, WeightSource, upload, upload_words};
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::host_table::TABLE;
use crate::model::layer::{QuantizedWeight, Weight};
use crate::model::placement::{Bytes, PerLayerTable, TablePlacement};
use crate::model::split_table::SplitTable;
use crate::op::device_memory::DeviceMemory;
use burn::module::{Module, Param};
use burn::tensor::Device;
use std::sync::Arc;

/// The inputs from which the loader decides whether the per-layer embedding table is placed in device memory or in host
/// memory.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub table: PerLayerTable,
    pub memory: DeviceMemory,
    pub form: WeightForm,
}

impl Loader<'_, '_> {
    /// Decides whether the per-layer embedding table is placed in device memory or in host memory. Refuses any other
    /// weight that exceeds the device's largest buffer.
    ///
    /// If the table stays on the device but exceeds the largest buffer, the function splits the table over several
    /// buffers. In this case, the function loads the table and returns it. In all other cases, the function returns
    /// `None`.
    pub(super) fn place(
        &mut self,
        model: &mut Gemma4Model,
        weights: &Arc<dyn WeightSource>,
        wanted: Wanted,
        device: &Device,
    ) -> Result<Option<SplitTable>, Gemma4Error> {
        let Wanted {
            table: asked,
            memory,
            form,
        } = wanted;
        let mut expected = Expected::default();
        model.visit(&mut expected);
        let (mut of_table, mut others) = (None, 0);
        for (path, _) in &expected.parameters {
            let bytes = self.bytes_on_device(path, form);
            if path == TABLE {
                of_table = Some(bytes);
                continue;
            }
            if !memory.has_buffer(bytes) {
                return Err(self.too_large(path, bytes, memory, ""));
            }
            others += bytes;
        }
        let Some(table) = of_table else {
            return Ok(None);
        };
        let in_files = self.source(TABLE).len();
        let sizes = [table, in_files, others];
        let mut placement = TablePlacement::choose(asked, sizes, memory);
        let mut split = None;
        if placement.is_on_host {
            model.embed_tokens_per_layer = None;
            model.host_table = Some(host_table(weights.clone()));
            self.total_bytes -= in_files;
        } else if let Some(largest) = memory.largest_buffer.filter(|most| table > *most) {
            if device.is_autodiff() {
                let advice = "; a table on the host cannot be trained";
                return Err(self.too_large(TABLE, table, memory, advice));
            }
            let parts = self.split(largest, form, device)?;
            placement.buffers = parts.parts.len();
            model.embed_tokens_per_layer = None;
            split = Some(parts);
            self.is_there(TABLE, in_files);
        }
        model.placement = Some(placement);
        Ok(split)
    }

    /// Returns the number of bytes that the parameter at `path` will occupy on the device.
    fn bytes_on_device(&self, path: &str, form: WeightForm) -> usize {
        let source = self.source(path);
        match form.layout(&source) {
            Some(layout) => source.rows() * layout.words() * size_of::<u32>(),
            None => source.shape.iter().product::<usize>() * self.dtype.size(),
        }
    }

    /// Loads the per-layer embedding table as several tensors. Each tensor fits into a buffer of `largest` bytes.
    fn split(
        &self,
        largest: usize,
        form: WeightForm,
        device: &Device,
    ) -> Result<SplitTable, Gemma4Error> {
        let source = self.source(TABLE);
        let layout = form.layout(&source);
        let [rows, columns] = [source.shape[0], source.shape[1]];
        let of_row = match layout {
            Some(layout) => layout.words() * size_of::<u32>(),
            None => columns * self.dtype.size(),
        };
        let of_part = largest / of_row;
        if of_part == 0 {
            let memory = DeviceMemory {
                largest_buffer: Some(largest),
                total: None,
            };
            return Err(self.too_large(TABLE, of_row, memory, ""));
        }
        let parts = (0..rows).step_by(of_part).map(|first| {
            let range = first..(first + of_part).min(rows);
            match layout {
                Some(layout) => {
                    let shape = [range.len(), columns];
                    let target = form.target();
                    let words = upload_words(&source, range, target, layout, device, PORTION);
                    Weight::Quantized(Box::new(QuantizedWeight::new(
                        words, layout, self.dtype, shape,
                    )))
                }
                None => {
                    let numbers = upload(&source, range, self.dtype, device, PORTION);
                    Weight::Whole(Param::from_tensor(numbers))
                }
            }
        });
        Ok(SplitTable::new(parts.collect(), of_part))
    }

    fn too_large(
        &self,
        path: &str,
        bytes: usize,
        memory: DeviceMemory,
        advice: &str,
    ) -> Gemma4Error {
        let name = &self.weights.names(path)[0];
        Gemma4Error::Device(format!(
            "{name} takes {} in {}, but a buffer holds at most {}{advice}",
            Bytes(bytes),
            self.dtype.name(),
            Bytes(memory.largest_buffer.unwrap_or(usize::MAX)),
        ))
    }
}
