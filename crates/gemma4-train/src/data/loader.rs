//! Loads rows as batches, in an order that a seed determines.
//!
//! A row is a sequence of packed documents. A pass is one iteration over all rows. An interval is the steps between two
//! checkpoints.

use crate::{
    checkpoint::stop::Stop,
    data::{
        media::{BatchPreparation, ExampleMedium},
        packing::Row,
        schedule::Schedule,
    },
};
use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use burn_gemma4::{BatchMedia, Packing, PromptEncoder};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The batches that one device processes in an optimizer step.
#[derive(Clone, Debug)]
pub struct Step {
    /// The number of the step, counted from 0.
    pub number: usize,
    /// The batches of this device. The device sums the gradients of all of these batches.
    pub batches: Vec<Batch>,
    /// The number of targets that the loss counts in all batches of the step, on all devices.
    pub targets: usize,
}

/// The rows that a model processes in one forward pass.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The token ids, `[rows, positions]`.
    pub tokens: Tensor<2, Int>,
    /// The id of the next token at each position, `[rows, positions]`. The id is negative at positions that the loss does
    /// not count.
    pub targets: Tensor<2, Int>,
    /// The number of targets that the loss counts.
    pub counted: usize,
    /// The positions of the documents within the rows.
    pub packing: Packing,
    /// The images and audio clips, or `None` if the data set has neither.
    pub media: Option<BatchMedia>,
}

/// The rows of a data set, with the settings that arrange them in batches.
#[derive(Debug)]
pub struct Data {
    /// All rows.
    pub rows: Vec<Row>,
    /// The number of positions per row, including padding.
    pub positions: usize,
    /// The number of rows per batch.
    pub batch: usize,
    /// The id of the padding token.
    pub padding: u32,
    /// The encoder that prepares images and audio clips, or `None` if the data set has neither.
    pub encoder: Option<Arc<PromptEncoder>>,
}

impl Data {
    /// Returns this data set with its settings, but without its rows.
    pub fn without_rows(self) -> Self {
        Self {
            rows: Vec::new(),
            ..self
        }
    }

    /// Begins to decode the images and clips of some batches, each a list of the indices of its rows. Returns `None` if the
    /// data set has neither.
    fn begin_media(&self, batches: &[Vec<usize>]) -> Option<BatchPreparation> {
        let encoder = self.encoder.clone()?;
        let of_row = |row: &usize| self.rows[*row].media.clone();
        let of_batch = |rows: &Vec<usize>| rows.iter().map(of_row).collect();
        let media: Vec<Vec<Vec<ExampleMedium>>> = batches.iter().map(of_batch).collect();
        Some(BatchPreparation::begin(media, encoder))
    }

    /// Builds a batch from the rows with the given indices, and decodes its images and clips.
    pub(crate) fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch, DatasetError> {
        let media = finished(self.begin_media(&[rows.to_vec()]), 1)?;
        let media = media.into_iter().next().flatten();
        self.batch_with(rows, media, device)
    }

    fn batch_with(
        &self,
        rows: &[usize],
        media: Option<BatchMedia>,
        device: &Device,
    ) -> Result<Batch, DatasetError> {
        let chosen = || rows.iter().map(|row| &self.rows[*row]);
        let shape = [rows.len(), self.positions];
        let tokens = chosen().flat_map(|row| row.padded_tokens(self.positions, self.padding));
        let targets = chosen().flat_map(|row| row.padded_targets(self.positions));
        let documents = chosen().map(|row| row.documents.clone()).collect();
        let tensor = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
        Ok(Batch {
            tokens: tensor(tokens.collect()),
            targets: tensor(targets.collect()),
            counted: self.counted(rows),
            packing: Packing::new(documents, self.positions).map_err(DatasetError::new)?,
            media,
        })
    }

    /// Returns the number of targets that the loss counts in the rows with the given indices.
    fn counted(&self, rows: &[usize]) -> usize {
        rows.iter().map(|row| self.rows[*row].counted()).sum()
    }
}

/// Waits for the images and clips of `batches` batches. A data set without them has `None` for each batch.
fn finished(
    preparation: Option<BatchPreparation>,
    batches: usize,
) -> Result<Vec<Option<BatchMedia>>, DatasetError> {
    Ok(match preparation {
        Some(preparation) => {
            let media = preparation.finish().map_err(DatasetError::new)?;
            media.into_iter().map(Some).collect()
        }
        None => vec![None; batches],
    })
}

/// Loads the batches of training steps, until the run is stopped. Each call of [`iter`](DataLoader::iter) loads the steps of
/// the next interval between checkpoints.
///
/// Each pass over the data has its own order of rows. The rows of a step depend only on the seed and the step's number.
/// These rows are divided among the devices.
pub struct TrainingLoader {
    data: Arc<Data>,
    schedule: Schedule,
    device: Device,
    /// The batches of each step are divided into equal parts, one per device. The pair holds the index of this device's
    /// part, and the number of parts.
    part: (usize, usize),
    /// The number of the next interval between checkpoints.
    interval: AtomicUsize,
    stop: Stop,
}

impl TrainingLoader {
    /// Returns a loader of the schedule's remaining steps. If several processes train, the loader loads only this
    /// process's part of each step's batches.
    pub fn new(data: Arc<Data>, schedule: Schedule, stop: Stop, device: &Device) -> Self {
        Self {
            data,
            schedule,
            device: device.clone(),
            part: schedule.part,
            interval: AtomicUsize::new(schedule.first_interval()),
            stop,
        }
    }

    fn copy(&self, device: &Device, part: (usize, usize)) -> Arc<dyn DataLoader<Step>> {
        let stop = self.stop.clone();
        Arc::new(Self {
            part,
            ..Self::new(self.data.clone(), self.schedule, stop, device)
        })
    }

    /// Returns the rows that this device processes in a step. `pass` caches the latest pass over the data: its number,
    /// and its order of rows.
    fn chosen(&self, step: usize, pass: &mut Option<(usize, Vec<usize>)>) -> Chosen {
        let rows = self.data.rows.len();
        let mut row_at = |index: usize| {
            let number = index / rows;
            let order = match &mut *pass {
                Some((of, order)) if *of == number => order,
                pass => &mut pass.insert((number, self.pass(number))).1,
            };
            order[index % rows]
        };
        let (part, parts) = self.part;
        let mut chosen = Chosen {
            batches: Vec::new(),
            targets: 0,
        };
        for batch in 0..self.schedule.batches() {
            let first = (step * self.schedule.batches() + batch) * self.data.batch;
            let rows: Vec<usize> = (first..first + self.data.batch).map(&mut row_at).collect();
            chosen.targets += self.data.counted(&rows);
            if batch % parts == part {
                chosen.batches.push(rows);
            }
        }
        chosen
    }

    /// Returns the order of the rows in the pass with this number. A pass is one iteration over all rows.
    fn pass(&self, number: usize) -> Vec<usize> {
        let seed = self.schedule.seed.wrapping_add((number as u64) << 32);
        let mut order: Vec<usize> = (0..self.data.rows.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        order
    }
}

impl DataLoader<Step> for TrainingLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Step> + 'a> {
        let interval = self.interval.fetch_add(1, Ordering::Relaxed);
        let steps = self.schedule.steps_of(interval);
        Box::new(Steps {
            loader: self,
            progress: Progress::new(0, steps.len(), Some("steps".into())),
            steps,
            pass: None,
            ahead: None,
        })
    }

    fn num_items(&self) -> usize {
        let Schedule {
            steps, interval, ..
        } = self.schedule;
        interval.min(steps) * self.schedule.devices / self.part.1
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Step>> {
        self.copy(device, self.part)
    }

    /// Returns a loader of the rows that one device processes in every step. Burn calls `slice` once per device, with a
    /// range of item indices. The start of the range determines the device. The end is ignored.
    fn slice(&self, start: usize, _end: usize) -> Arc<dyn DataLoader<Step>> {
        let devices = self.schedule.devices;
        let steps = self.num_items() / devices;
        self.copy(&self.device, (start / steps, devices))
    }
}

/// The rows that one device uses in a step.
struct Chosen {
    /// The indices of this device's rows, as one list per batch.
    batches: Vec<Vec<usize>>,
    /// The number of targets that the loss counts on all devices together.
    targets: usize,
}

struct Steps<'a> {
    loader: &'a TrainingLoader,
    steps: Range<usize>,
    pass: Option<(usize, Vec<usize>)>,
    /// The rows of the next step, whose images and clips are decoded during the current step.
    ahead: Option<Ahead>,
    progress: Progress,
}

/// The rows of a step, and the decoding of their images and clips.
struct Ahead {
    step: usize,
    chosen: Chosen,
    media: Option<BatchPreparation>,
}

impl Steps<'_> {
    /// Returns the rows of a step, whose images and clips may be decoded already.
    fn begin(&mut self, step: usize) -> Ahead {
        if let Some(ahead) = self.ahead.take().filter(|ahead| ahead.step == step) {
            return ahead;
        }
        let chosen = self.loader.chosen(step, &mut self.pass);
        Ahead {
            step,
            media: self.loader.data.begin_media(&chosen.batches),
            chosen,
        }
    }
}

impl Iterator for Steps<'_> {
    type Item = Result<Step, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let TrainingLoader {
            data, device, stop, ..
        } = self.loader;
        let step = self.steps.next()?;
        let is_alone = self.loader.schedule.devices == 1;
        if stop.is_before(step, is_alone) {
            return None;
        }
        let Ahead { chosen, media, .. } = self.begin(step);
        let Chosen { batches, targets } = chosen;
        self.progress.items_processed += 1;
        let media = match finished(media, batches.len()) {
            Ok(media) => media,
            Err(error) => return Some(Err(error)),
        };
        if data.encoder.is_some() && !self.steps.is_empty() {
            self.ahead = Some(self.begin(step + 1));
        }
        let batches = batches.iter().zip(media);
        let batches = batches.map(|(rows, media)| data.batch_with(rows, media, device));
        Some(batches.collect::<Result<_, _>>().map(|batches| Step {
            number: step,
            batches,
            targets,
        }))
    }
}

impl DataLoaderIterator<Step> for Steps<'_> {
    fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

/// Loads all batches of the data in the order of the rows. The loader ends early if the run is stopped.
pub struct ValidationLoader {
    data: Arc<Data>,
    device: Device,
    stop: Stop,
}

impl ValidationLoader {
    /// Returns a loader of all rows of `data`.
    pub fn new(data: Arc<Data>, stop: Stop, device: &Device) -> Self {
        Self {
            data,
            device: device.clone(),
            stop,
        }
    }
}

impl DataLoader<Batch> for ValidationLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let rows: Vec<usize> = (0..self.data.rows.len()).collect();
        let batches: Vec<_> = rows.chunks(self.data.batch).map(Vec::from).collect();
        Box::new(Batches {
            loader: self,
            batches: batches.into_iter(),
            done: 0,
        })
    }

    fn num_items(&self) -> usize {
        self.data.rows.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self::new(self.data.clone(), self.stop.clone(), device))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let data = Data {
            rows: self.data.rows[start..end].to_vec(),
            encoder: self.data.encoder.clone(),
            ..*self.data
        };
        let stop = self.stop.clone();
        Arc::new(Self::new(Arc::new(data), stop, &self.device))
    }
}

struct Batches<'a> {
    loader: &'a ValidationLoader,
    batches: std::vec::IntoIter<Vec<usize>>,
    done: usize,
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let ValidationLoader { data, device, stop } = self.loader;
        let rows = self.batches.next().filter(|_| !stop.is_asked())?;
        self.done += rows.len();
        Some(data.batch(&rows, device))
    }
}

impl DataLoaderIterator<Batch> for Batches<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.loader.num_items(), Some("rows".into()))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    const ROWS: usize = 7;

    fn loader(accumulation: usize, devices: usize, done: usize) -> TrainingLoader {
        let row = |token: u32| Row {
            tokens: vec![token; 2],
            targets: vec![token as i32, -1],
            documents: vec![2],
            media: Vec::new(),
        };
        let data = Data {
            rows: (0..ROWS as u32).map(row).collect(),
            positions: 3,
            batch: 2,
            padding: 99,
            encoder: None,
        };
        let schedule = Schedule {
            steps: 10,
            done,
            interval: 4,
            accumulation,
            devices,
            part: (0, 1),
            seed: 3,
        };
        let device = Device::flex();
        TrainingLoader::new(Arc::new(data), schedule, Stop::default(), &device)
    }

    /// Returns the first token of each row of the next interval, as one list per step.
    fn first_tokens(loader: &dyn DataLoader<Step>) -> Vec<Vec<i64>> {
        let of_batch = |batch: Batch| {
            let tokens = batch.tokens.narrow(1, 0, 1);
            tokens.into_data().iter::<i64>().collect::<Vec<_>>()
        };
        let of_step = |step: Result<Step, DatasetError>| {
            let batches = step.expect("a step").batches;
            batches.into_iter().flat_map(of_batch).collect()
        };
        loader.iter().map(of_step).collect()
    }

    #[test]
    fn training_loader_pass_has_every_row_once() {
        let loader = loader(1, 1, 0);
        let all: Vec<i64> = (0..3)
            .flat_map(|_| first_tokens(&loader))
            .flatten()
            .collect();
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
    fn training_loader_with_finished_steps_continues_the_same_order() {
        let whole = loader(2, 1, 0);
        let intervals: Vec<_> = (0..3).map(|_| first_tokens(&whole)).collect();
        let later = loader(2, 1, 4);
        assert_eq!(first_tokens(&later), intervals[1]);
        assert_eq!(first_tokens(&later), intervals[2]);
        let within = loader(2, 1, 6);
        assert_eq!(first_tokens(&within), intervals[1][2..]);
        assert_eq!(first_tokens(&within), intervals[2]);
    }

    #[test]
    fn sliced_loaders_split_the_rows_of_one_device() {
        let alone = first_tokens(&loader(2, 1, 0));
        let whole = loader(1, 2, 0);
        let items = whole.num_items();
        let halves = [whole.slice(0, items / 2), whole.slice(items / 2, items)];
        let [first, second] = halves.map(|half| first_tokens(&*half));
        let together = first.into_iter().zip(second);
        let together: Vec<_> = together.map(|(a, b)| [a, b].concat()).collect();
        assert_eq!(together, alone);
    }

    #[test]
    fn processes_split_the_rows_of_one_process() {
        let alone = first_tokens(&loader(3, 1, 0));
        let all = loader(1, 3, 0);
        let processes: Vec<_> = (0..3)
            .map(|rank| {
                let schedule = Schedule {
                    part: (rank, 3),
                    ..all.schedule
                };
                let stop = Stop::default();
                let loader = TrainingLoader::new(all.data.clone(), schedule, stop, &all.device);
                assert_eq!(loader.num_items(), 4);
                first_tokens(&loader)
            })
            .collect();
        let together: Vec<_> = (0..alone.len())
            .map(|step| processes.iter().flat_map(|own| own[step].clone()).collect())
            .collect::<Vec<Vec<_>>>();
        assert_eq!(together, alone);
    }

    #[test]
    fn step_counts_the_targets_of_all_devices() {
        let whole = loader(2, 3, 0);
        let items = whole.num_items();
        let (start, end) = (items / 3, 2 * (items / 3));
        let second = whole.slice(start, end);
        let step = second.iter().next().expect("a step").expect("a step");
        assert_eq!(step.targets, 2 * 3 * 2);
        let counted: Vec<_> = step.batches.iter().map(|batch| batch.counted).collect();
        assert_eq!(counted, [2, 2]);
    }

    #[test]
    fn batch_of_short_rows_is_padded() {
        let loader = loader(1, 1, 0);
        let step = loader.iter().next().expect("a step").expect("a step");
        let batch = step.batches[0].clone();
        assert_eq!(batch.tokens.dims(), [2, 3]);
        let last = |tensor: Tensor<2, Int>| {
            let last = tensor.narrow(1, 2, 1).into_data();
            last.iter::<i64>().collect::<Vec<_>>()
        };
        assert_eq!(last(batch.tokens), [99, 99]);
        assert_eq!(last(batch.targets), [-1, -1]);
    }
}
