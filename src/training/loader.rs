//! Rows as batches, in an order that a seed determines.

use super::rows::Row;
use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use burn_gemma4::Packing;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// What a model is trained on at once.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[rows, positions]`.
    pub tokens: Tensor<2, Int>,
    /// `[rows, positions]`: the next token, negative where the loss does not count.
    pub targets: Tensor<2, Int>,
    /// Where the documents are.
    pub packing: Packing,
}

/// Rows and how they become batches.
#[derive(Debug)]
pub struct Data {
    /// All rows.
    pub rows: Vec<Row>,
    /// Tokens of a row.
    pub positions: usize,
    /// Rows of a batch.
    pub batch: usize,
    /// What fills rows up.
    pub padding: u32,
}

impl Data {
    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch, DatasetError> {
        let chosen = || rows.iter().map(|row| &self.rows[*row]);
        let shape = [rows.len(), self.positions];
        let tokens = chosen().flat_map(|row| row.padded_tokens(self.positions, self.padding));
        let targets = chosen().flat_map(|row| row.padded_targets(self.positions));
        let documents = chosen().map(|row| row.documents.clone()).collect();
        let tensor = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
        Ok(Batch {
            tokens: tensor(tokens.collect()),
            targets: tensor(targets.collect()),
            packing: Packing::new(documents, self.positions).map_err(DatasetError::new)?,
        })
    }
}

/// The batches of the steps between two checkpoints, of the next ones with each [`iter`](DataLoader::iter). Every pass over
/// the data has an order of its own; which rows a step takes depends on the seed and its number only, and with several
/// devices each takes its part of them.
pub struct TrainingLoader {
    data: Arc<Data>,
    schedule: Schedule,
    device: Device,
    /// Which of the devices this is for, of how many.
    part: (usize, usize),
    /// The interval between checkpoints that comes next.
    interval: AtomicUsize,
    first_interval: usize,
}

/// How many steps there are, and of what.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Steps in all.
    pub steps: usize,
    /// Steps from one checkpoint to the next.
    pub interval: usize,
    /// Batches that one device adds up for a step.
    pub accumulation: usize,
    /// Devices.
    pub devices: usize,
    /// Determines the order.
    pub seed: u64,
}

impl Schedule {
    /// How many intervals there are.
    pub fn intervals(&self) -> usize {
        self.steps.div_ceil(self.interval)
    }

    /// The steps of an interval.
    pub fn steps_of(&self, interval: usize) -> Range<usize> {
        let start = interval * self.interval;
        start..self.steps.min(start + self.interval)
    }

    /// Batches that all devices take for a step.
    pub fn batches(&self) -> usize {
        self.accumulation * self.devices
    }
}

impl TrainingLoader {
    /// Of the steps after `first_interval` intervals.
    pub fn new(
        data: Arc<Data>,
        schedule: Schedule,
        first_interval: usize,
        device: &Device,
    ) -> Self {
        Self {
            data,
            schedule,
            device: device.clone(),
            part: (0, 1),
            interval: AtomicUsize::new(first_interval),
            first_interval,
        }
    }

    fn copy(&self, device: &Device, part: (usize, usize)) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self {
            part,
            ..Self::new(
                self.data.clone(),
                self.schedule,
                self.first_interval,
                device,
            )
        })
    }

    /// The rows of an interval's batches, batch by batch.
    fn order(&self, interval: usize) -> Vec<Vec<usize>> {
        let rows = self.data.rows.len();
        let mut pass = None;
        let mut row_at = |index: usize| {
            let number = index / rows;
            let order = match &mut pass {
                Some((of, order)) if *of == number => order,
                pass => &mut pass.insert((number, self.pass(number))).1,
            };
            order[index % rows]
        };
        let (part, parts) = self.part;
        let mut batches = Vec::new();
        for step in self.schedule.steps_of(interval) {
            for batch in 0..self.schedule.batches() {
                if batch % parts == part {
                    let first = (step * self.schedule.batches() + batch) * self.data.batch;
                    batches.push((first..first + self.data.batch).map(&mut row_at).collect());
                }
            }
        }
        batches
    }

    /// The order of the rows in a pass over the data.
    fn pass(&self, number: usize) -> Vec<usize> {
        let seed = self.schedule.seed.wrapping_add((number as u64) << 32);
        let mut order: Vec<usize> = (0..self.data.rows.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        order
    }
}

impl DataLoader<Batch> for TrainingLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let interval = self.interval.fetch_add(1, Ordering::Relaxed);
        Box::new(Batches::new(&self.data, &self.device, self.order(interval)))
    }

    fn num_items(&self) -> usize {
        let steps = self.schedule.interval.min(self.schedule.steps);
        steps * self.schedule.batches() / self.part.1 * self.data.batch
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        self.copy(device, self.part)
    }

    /// Burn slices for devices; each gets its part of every step.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let items = self.num_items();
        let size = items / self.schedule.devices;
        debug_assert_eq!(end - start, size, "as many slices as devices");
        self.copy(&self.device, (start / size, self.schedule.devices))
    }
}

/// All batches of the data, in their order.
pub struct ValidationLoader {
    data: Arc<Data>,
    device: Device,
}

impl ValidationLoader {
    /// Of `data`.
    pub fn new(data: Arc<Data>, device: &Device) -> Self {
        Self {
            data,
            device: device.clone(),
        }
    }
}

impl DataLoader<Batch> for ValidationLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let rows: Vec<usize> = (0..self.data.rows.len()).collect();
        let batches = rows.chunks(self.data.batch).map(Vec::from).collect();
        Box::new(Batches::new(&self.data, &self.device, batches))
    }

    fn num_items(&self) -> usize {
        self.data.rows.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self::new(self.data.clone(), device))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let data = Data {
            rows: self.data.rows[start..end].to_vec(),
            ..*self.data
        };
        Arc::new(Self::new(Arc::new(data), &self.device))
    }
}

struct Batches<'a> {
    data: &'a Data,
    device: &'a Device,
    batches: std::vec::IntoIter<Vec<usize>>,
    done: usize,
    total: usize,
}

impl<'a> Batches<'a> {
    fn new(data: &'a Data, device: &'a Device, batches: Vec<Vec<usize>>) -> Self {
        Self {
            data,
            device,
            done: 0,
            total: batches.iter().map(Vec::len).sum(),
            batches: batches.into_iter(),
        }
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rows = self.batches.next()?;
        self.done += rows.len();
        Some(self.data.batch(&rows, self.device))
    }
}

impl DataLoaderIterator<Batch> for Batches<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.total, Some("rows".into()))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    const ROWS: usize = 7;

    fn loader(accumulation: usize, devices: usize, first_interval: usize) -> TrainingLoader {
        let row = |token: u32| Row {
            tokens: vec![token; 2],
            targets: vec![token as i32, -1],
            documents: vec![2],
        };
        let data = Data {
            rows: (0..ROWS as u32).map(row).collect(),
            positions: 3,
            batch: 2,
            padding: 99,
        };
        let schedule = Schedule {
            steps: 10,
            interval: 4,
            accumulation,
            devices,
            seed: 3,
        };
        TrainingLoader::new(Arc::new(data), schedule, first_interval, &Device::flex())
    }

    fn first_tokens(loader: &dyn DataLoader<Batch>) -> Vec<i64> {
        let of_batch = |batch: Result<Batch, DatasetError>| {
            let tokens = batch.expect("a batch").tokens.narrow(1, 0, 1);
            tokens.into_data().iter::<i64>().collect::<Vec<_>>()
        };
        loader.iter().flat_map(of_batch).collect()
    }

    #[test]
    fn every_pass_has_every_row_once() {
        let loader = loader(1, 1, 0);
        let all: Vec<i64> = (0..3).flat_map(|_| first_tokens(&loader)).collect();
        assert_eq!(all.len(), 10 * 2);
        let mut orders = Vec::new();
        for pass in all.chunks_exact(ROWS) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..ROWS as i64).collect::<Vec<_>>());
            orders.push(pass);
        }
        assert_ne!(orders[0], orders[1]);
    }

    #[test]
    fn a_later_start_has_the_same_batches() {
        let whole = loader(2, 1, 0);
        let intervals: Vec<_> = (0..3).map(|_| first_tokens(&whole)).collect();
        let later = loader(2, 1, 1);
        assert_eq!(first_tokens(&later), intervals[1]);
        assert_eq!(first_tokens(&later), intervals[2]);
    }

    #[test]
    fn devices_share_the_rows_that_one_would_take() {
        let alone = first_tokens(&loader(2, 1, 0));
        let whole = loader(1, 2, 0);
        let items = whole.num_items();
        let halves = [whole.slice(0, items / 2), whole.slice(items / 2, items)];
        let [first, second] = halves.map(|half| first_tokens(&*half));
        let together = first.chunks(2).zip(second.chunks(2));
        let together: Vec<i64> = together.flat_map(|(a, b)| [a, b].concat()).collect();
        assert_eq!(together, alone);
    }

    #[test]
    fn rows_are_filled_up() {
        let loader = loader(1, 1, 0);
        let batch = loader.iter().next().expect("a batch").expect("a batch");
        assert_eq!(batch.tokens.dims(), [2, 3]);
        let last = |tensor: Tensor<2, Int>| {
            let last = tensor.narrow(1, 2, 1).into_data();
            last.iter::<i64>().collect::<Vec<_>>()
        };
        assert_eq!(last(batch.tokens), [99, 99]);
        assert_eq!(last(batch.targets), [-1, -1]);
    }
}
