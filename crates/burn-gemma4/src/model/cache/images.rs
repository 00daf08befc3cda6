//! The keys that the soft tokens of images see in sliding layers.

use super::{Cache, Call};
use crate::model::soft_tokens::CallMedia;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

impl Cache {
    /// Changes the rules of a call, so that the soft tokens of an image see each other in both directions in sliding
    /// layers. A key before the window stays hidden. Full layers stay causal, and so do audio clips. Does nothing if
    /// no image needs this rule.
    ///
    /// The call must contain every image whole, and must be made by [`call`](Self::call) of this cache.
    pub(crate) fn see_images(&self, call: &mut Call, media: &CallMedia, device: &Device) {
        if !media.has_blocks() {
            return;
        }
        // Sliding layers attend to the last `kept` columns of the cache and to the columns of the call.
        let (kept, window, shape) = (self.kept(), self.window, [self.batch(), call.count]);
        let queries = || {
            (0..shape[0]).flat_map(|sequence| (0..shape[1]).map(move |column| (sequence, column)))
        };
        let starts = queries().map(|(_, column)| (kept + column + 1).saturating_sub(window));
        let ends = queries().map(|(sequence, column)| {
            let block = media.block(sequence, column);
            kept + block.map_or(column + 1, |columns| columns.end)
        });
        let bound = |bounds: Vec<usize>| {
            let bounds: Vec<i32> = bounds.into_iter().map(|bound| bound as i32).collect();
            Tensor::<2, Int>::from_data(TensorData::new(bounds, shape), (device, DType::I32))
        };
        call.sliding.intervals = vec![[bound(starts.collect()), bound(ends.collect())]];
        call.sliding.causal = false;
        call.sliding.window = None;
    }
}
