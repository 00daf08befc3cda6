//! A ring of devices, each with a thread.

use super::link::{Link, Pair};
use super::passes::{Forward, Gradients, Shard, backward, forward};
use super::worker::{Stopped, Worker};
use super::zigzag::Zigzag;
use crate::Error;
use burn::tensor::{Device, Tensor};
use std::sync::mpsc::channel;

/// A ring of ranks, each with a device and a thread. Several ranks may have the same device.
///
/// All results are in the order of the ranks. A pass returns when the devices of all ranks have finished.
///
/// ```
/// use attention_workspace::ring::{Ring, Shard};
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let ring = Ring::new(vec![device.clone(); 2])?;
/// let random = |heads| Tensor::<4>::random([1, heads, 12, 8], Distribution::Default, &device);
/// let [query, key, value] = [random(2), random(1), random(1)].map(|tensor| ring.scatter(&tensor));
/// let shards = query?.into_iter().zip(key?).zip(value?);
/// let shards: Vec<Shard> = shards
///     .map(|((query, key), value)| Shard { query, key, value })
///     .collect();
/// let outputs = ring.forward(&shards)?.into_iter().map(|forward| forward.output);
/// let output = ring.gather(&outputs.collect::<Vec<_>>())?; // causal attention over all 12 positions
/// assert_eq!(output.dims(), [1, 2, 12, 8]);
/// # }
/// # Ok::<(), attention_workspace::Error>(())
/// ```
pub struct Ring {
    devices: Vec<Device>,
    ranks: Vec<Worker>,
    courier: Worker,
}

impl Ring {
    /// Creates a ring with one rank per item of `devices`.
    ///
    /// # Errors
    /// Returns an error if there is no device, or if the operating system starts no further thread.
    pub fn new(devices: Vec<Device>) -> Result<Self, Error> {
        if devices.is_empty() {
            return Err("devices: the ring has no device; expected at least 1".into());
        }
        let ranks = (0..devices.len()).map(|rank| Worker::spawn(format!("rank {rank}")));
        Ok(Self {
            ranks: ranks.collect::<Result<_, _>>()?,
            courier: Worker::spawn("courier".into())?,
            devices,
        })
    }

    /// Divides a tensor among the ranks, and copies each shard to the device of its rank.
    ///
    /// # Shapes
    /// `tensor [batch, heads, tokens, dim]`; the shards have `tokens / ranks` rows.
    ///
    /// # Errors
    /// Returns an error if `tokens` is not a multiple of twice the number of ranks, or if a device reports a fault.
    pub fn scatter(&self, tensor: &Tensor<4>) -> Result<Vec<Tensor<4>>, Error> {
        let zigzag = Zigzag::new(self.devices.len(), tensor.dims()[2])?;
        let sources = zigzag.divide(tensor);
        let pairs = sources.iter().zip(&self.devices);
        let shards: Vec<_> = pairs
            .map(|(source, device)| source.clone().to_device(device))
            .collect();
        // The sources must outlive the copies. `Link::close` gives the reason.
        for device in &self.devices {
            device.sync()?;
        }
        Ok(shards)
    }

    /// Copies the shards of all ranks to the device of rank 0, and joins them in the order of the sequence.
    ///
    /// # Errors
    /// Returns an error if the shards do not fit the ring, or if a device reports a fault.
    pub fn gather(&self, shards: &[Tensor<4>]) -> Result<Tensor<4>, Error> {
        let zigzag = self.zigzag(shards)?;
        let copies = shards
            .iter()
            .map(|shard| shard.clone().to_device(&self.devices[0]));
        let joined = zigzag.join(&copies.collect::<Vec<_>>());
        self.devices[0].sync()?;
        Ok(joined)
    }

    /// Computes causal attention over the whole sequence.
    ///
    /// # Errors
    /// Returns an error if the shards do not fit the ring or each other, or if a device reports a fault.
    pub fn forward(&self, shards: &[Shard]) -> Result<Vec<Forward>, Error> {
        let queries: Vec<_> = shards.iter().map(|shard| shard.query.clone()).collect();
        self.run(self.zigzag(&queries)?, shards.to_vec(), forward)
    }

    /// Computes the gradients of queries, keys and values from the results of [`forward`](Self::forward) and the
    /// gradient of the output.
    ///
    /// # Errors
    /// Returns an error if the arguments do not fit the ring or each other, or if a device reports a fault.
    pub fn backward(
        &self,
        shards: &[Shard],
        forward: &[Forward],
        output_gradients: &[Tensor<4>],
    ) -> Result<Vec<Gradients>, Error> {
        let zigzag = self.zigzag(output_gradients)?;
        let inputs = shards.iter().zip(forward).zip(output_gradients);
        let inputs = inputs
            .map(|((shard, forward), gradient)| (shard.clone(), forward.clone(), gradient.clone()));
        self.run(zigzag, inputs.collect(), backward)
    }

    /// Returns the division of the sequence whose shards are given.
    fn zigzag(&self, shards: &[Tensor<4>]) -> Result<Zigzag, Error> {
        self.check_count(shards.len())?;
        let rows = shards.iter().map(|shard| shard.dims()[2]);
        Zigzag::new(self.devices.len(), rows.sum())
    }

    fn check_count(&self, count: usize) -> Result<(), Error> {
        let ranks = self.devices.len();
        match count == ranks {
            true => Ok(()),
            false => {
                Err(format!("shards: found {count}; expected {ranks}, one for each rank").into())
            }
        }
    }

    /// Runs a pass on all ranks at the same time, and waits for all devices.
    fn run<I: Send + 'static, O: Send + 'static>(
        &self,
        zigzag: Zigzag,
        inputs: Vec<I>,
        pass: fn(I, &mut Link) -> Result<O, Error>,
    ) -> Result<Vec<O>, Error> {
        self.check_count(inputs.len())?;
        let links = Link::all(&self.devices, zigzag, &self.courier);
        let mut waiting = Vec::new();
        for ((worker, input), mut link) in self.ranks.iter().zip(inputs).zip(links) {
            let (sender, outcome) = channel();
            worker.submit(move || {
                let run = || -> Result<(O, Vec<Pair>), Error> {
                    let result = pass(input, &mut link)?;
                    link.device().sync()?;
                    Ok((result, link.close()))
                };
                // The result is ignored. The call fails only if the caller has an error of another rank.
                let _ = sender.send(run());
            })?;
            waiting.push(outcome);
        }
        // All ranks are waited for before the tensors that they have sent are dropped.
        let outcomes = waiting
            .into_iter()
            .map(|outcome| outcome.recv().unwrap_or_else(|_| Err(Stopped.into())));
        let mut outcomes: Vec<_> = outcomes.collect();
        // The rank that failed first has the cause. The ranks that waited for it have stopped.
        let is_cause = |outcome: &Result<_, Error>| {
            outcome.as_ref().is_err_and(|error| !error.is::<Stopped>())
        };
        if let Some(index) = outcomes.iter().position(is_cause) {
            outcomes.swap(0, index);
        }
        let finished: Vec<(O, Vec<Pair>)> = outcomes.into_iter().collect::<Result<_, _>>()?;
        Ok(finished.into_iter().map(|(result, _)| result).collect())
    }
}
