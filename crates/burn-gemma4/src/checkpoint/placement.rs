//! Where the table of per-layer embeddings goes: it is half of a small model's weights, and a token reads one row of it.

use super::{
    Expected, Form, Loader,
    host_table::{HostTable, TABLE},
    source::{PORTION, Weights, upload, upload_words},
};
#[cfg(feature = "cube")]
use crate::op;
use crate::{
    Gemma4Error, Gemma4Model,
    model::{
        layer::{QuantizedWeight, Weight},
        per_layer::SplitTable,
    },
};
use burn::{
    module::{Module, Param},
    tensor::Device,
};
use std::{fmt, sync::Arc};

/// Where a model has its table of per-layer embeddings, if it has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PerLayerTable {
    /// On the device, if one of its buffers and its memory hold it beside the other weights, by what the device says of itself; else on the
    /// host. Who trains all weights asks for [`Device`](Self::Device).
    #[default]
    Auto,
    /// On the host: in the checkpoint's files, mapped into memory, as they have it, quantized or not. A token's row goes to the device when it
    /// is read, 18 KB of E2B's in bf16. Such a table is no parameter: it is not trained, and [`LoadOptions::quantization`](super::LoadOptions::quantization)
    /// leaves it alone. Nobody may write to the files as long as the model lives.
    Host,
    /// On the device; in several parts where one buffer does not hold it, which are for inference alone.
    Device,
}

/// What a device says of its memory; nothing where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of a buffer at most.
    pub largest_buffer: Option<usize>,
    /// Bytes of all of it.
    pub total: Option<usize>,
}

impl DeviceMemory {
    /// Of a device. A processor says nothing.
    pub fn of(device: &Device) -> Self {
        let _ = device;
        #[cfg(feature = "cube")]
        if let Some(memory) = op::memory(device) {
            return memory;
        }
        Self::default()
    }

    /// Whether a buffer holds so many bytes.
    fn has_buffer(self, bytes: usize) -> bool {
        self.largest_buffer.is_none_or(|largest| bytes <= largest)
    }

    /// Whether so many bytes of weights leave an eighth to all else.
    fn holds(self, bytes: usize) -> bool {
        self.total.is_none_or(|total| bytes <= total / 8 * 7)
    }
}

/// Where a model's table of per-layer embeddings is, and why. As text it is a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePlacement {
    /// Whether it is in the checkpoint's files rather than on the device.
    pub is_on_host: bool,
    /// Its bytes where it is.
    pub bytes: usize,
    /// Buffers that it is in; 0 on the host.
    pub buffers: usize,
    /// Bytes of all other weights, on the device.
    pub other_bytes: usize,
    /// What was known of the device.
    pub memory: DeviceMemory,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It was said where.
    Asked,
    Fits,
    /// What it would take on the device.
    LargerThanBuffer(usize),
    /// The same.
    LargerThanMemory(usize),
}

impl TablePlacement {
    /// Of a table and other weights that take so many bytes on the device; `in_files` is what the table takes there.
    fn choose(
        asked: PerLayerTable,
        [table, in_files, other_bytes]: [usize; 3],
        memory: DeviceMemory,
    ) -> Self {
        let reason = match asked {
            PerLayerTable::Host | PerLayerTable::Device => Reason::Asked,
            PerLayerTable::Auto if !memory.has_buffer(table) => Reason::LargerThanBuffer(table),
            PerLayerTable::Auto if !memory.holds(table + other_bytes) => {
                Reason::LargerThanMemory(table)
            }
            PerLayerTable::Auto => Reason::Fits,
        };
        let is_on_host = match reason {
            Reason::Asked => asked == PerLayerTable::Host,
            Reason::Fits => false,
            Reason::LargerThanBuffer(_) | Reason::LargerThanMemory(_) => true,
        };
        Self {
            is_on_host,
            bytes: if is_on_host { in_files } else { table },
            buffers: usize::from(!is_on_host),
            other_bytes,
            memory,
            reason,
        }
    }
}

impl fmt::Display for TablePlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, others) = (Bytes(self.bytes), Bytes(self.other_bytes));
        let total = self.memory.total.map(Bytes);
        let buffer = self.memory.largest_buffer.map(Bytes);
        match self.is_on_host {
            true => write!(
                f,
                "per-layer embeddings: {bytes} stay in the file, read by rows; {others} of other weights on the device"
            )?,
            false => write!(
                f,
                "per-layer embeddings: {bytes} on the device, with {others} of other weights"
            )?,
        }
        if self.buffers > 1 {
            write!(f, ", in {} buffers", self.buffers)?;
        }
        match (self.reason, buffer, total) {
            (Reason::LargerThanBuffer(table), Some(buffer), _) => write!(
                f,
                ", which would need {} in a buffer and has {buffer} at most",
                Bytes(table)
            ),
            (Reason::LargerThanMemory(table), _, Some(total)) => write!(
                f,
                ", which would need {} more and has {total}",
                Bytes(table)
            ),
            (Reason::Fits, _, Some(total)) => write!(f, ", which has {total}"),
            _ => Ok(()),
        }
    }
}

/// For people.
struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..1_000_000 => write!(f, "{:.1} KB", bytes / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} MB", bytes / 1e6),
            _ => write!(f, "{:.2} GB", bytes / 1e9),
        }
    }
}

/// What is asked for, of what device.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub table: PerLayerTable,
    pub memory: DeviceMemory,
    pub form: Form,
}

impl Loader<'_, '_> {
    /// Puts the table where it belongs, and refuses weights that no buffer of the device holds. A table in parts is the result: it is
    /// complete, and no parameter that is still to be loaded.
    pub(super) fn place(
        &mut self,
        model: &mut Gemma4Model,
        weights: &Arc<dyn Weights>,
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
            model.host_table = Some(HostTable::of(weights.clone()));
            self.total_bytes -= in_files;
        } else if let Some(largest) = memory.largest_buffer.filter(|most| table > *most) {
            if device.is_autodiff() {
                let advice = "; on the host it would not be trained";
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

    /// Bytes that a parameter takes on the device.
    fn bytes_on_device(&self, path: &str, form: Form) -> usize {
        let source = self.source(path);
        match form.layout(&source) {
            Some(layout) => source.rows() * layout.words() * size_of::<u32>(),
            None => source.shape.iter().product::<usize>() * self.dtype.size(),
        }
    }

    /// The table in as few parts as buffers of so many bytes hold.
    fn split(
        &self,
        largest: usize,
        form: Form,
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
            "{name} takes {} in {}, and a buffer holds {} at most{advice}",
            Bytes(bytes),
            self.dtype.name(),
            Bytes(memory.largest_buffer.unwrap_or(usize::MAX)),
        ))
    }
}
