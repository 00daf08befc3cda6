//! The placement of the per-layer embedding table, on the device or on the host. The table is half of a small model's
//! weights, but each token needs only one row of the table.

use crate::op::device_memory::DeviceMemory;
use std::fmt;

/// The placement of the per-layer embedding table that the caller requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PerLayerTable {
    /// Places the table on the device if the table fits in one buffer, and if all weights fit in device memory. Otherwise
    /// the table stays on the host. Full training needs [`Device`](Self::Device).
    #[default]
    Auto,
    /// Keeps the table in host memory, in the checkpoint's mapped files. For each input token, the model uploads one row: 18
    /// KB for E2B in bf16. The table is not trained. No program may write to the files while the model exists.
    Host,
    /// Places the table on the device. A table that is larger than one buffer is split, and then supports inference only.
    Device,
}

/// The chosen placement of a model's per-layer embedding table, and the reason for it. `Display` formats both as a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePlacement {
    /// True if the table is in the checkpoint's files instead of device memory.
    pub is_on_host: bool,
    /// The size of the table in bytes. For a table on the host, this is its size in the checkpoint's files. For a table
    /// on the device, this is its size in device memory.
    pub bytes: usize,
    /// The number of device buffers that hold the table. It is 0 if the table is on the host.
    pub buffers: usize,
    /// The size of all other weights on the device in bytes.
    pub other_bytes: usize,
    /// The memory limits that the device reports.
    pub memory: DeviceMemory,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The caller requested the placement.
    Asked,
    Fits,
    /// The table does not fit into one device buffer. The field is the table's size on the device in bytes.
    LargerThanBuffer(usize),
    /// The other weights leave too little device memory for the table. The field is the table's size on the device in bytes.
    LargerThanMemory(usize),
}

impl TablePlacement {
    /// Chooses the placement of the per-layer embedding table. All sizes are in bytes. `table` is the table's size on the
    /// device, and `in_files` is its size in the checkpoint's files. `other_bytes` is the size of the other weights on the
    /// device.
    pub(crate) fn choose(
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

/// A size in bytes, which `Display` formats in KB, MB or GB.
pub(crate) struct Bytes(pub usize);

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
