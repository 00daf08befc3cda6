//! The connections between the ranks of a ring.
//!
//! One thread, the courier, issues all copies between devices. On CUDA, CubeCL copies by NCCL, and each device has one
//! stream for NCCL. Two devices that send to each other in different orders would both wait forever. The courier gives
//! all devices the same order of copies.
//!
//! The courier has its own stream on each device. Copies therefore overlap with the kernels of the ranks.

use super::worker::{Stopped, Worker};
use super::zigzag::{Call, Zigzag};
use crate::Error;
use burn::tensor::{Device, Tensor};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A pair of tensors: keys and values, or their gradients.
pub type Pair = [Tensor<4>; 2];

/// A pair of tensors on the receiver's device, and the rank that sent the pair.
struct Parcel {
    sender: usize,
    pair: Pair,
}

/// The address of a rank: its device, and the channel to its thread.
#[derive(Clone)]
struct Address {
    device: Device,
    parcels: Sender<Parcel>,
}

/// The connections of one rank to the other ranks, for one pass. Dropping a link ends the pass of every rank that waits
/// for this rank.
pub struct Link {
    rank: usize,
    zigzag: Zigzag,
    device: Device,
    courier: Worker,
    next: Address,
    visitors: Receiver<Parcel>,
    /// The addresses to which ranks return the gradients of visiting keys and values, by rank.
    owners: Vec<Address>,
    returned: Receiver<Parcel>,
    sent: Vec<Pair>,
}

impl Link {
    /// Creates the links of all ranks for one pass.
    pub fn all(devices: &[Device], zigzag: Zigzag, courier: &Worker) -> Vec<Self> {
        let addresses = || -> (Vec<Address>, Vec<Receiver<Parcel>>) {
            let address = |device: &Device| {
                let (parcels, receiver) = channel();
                let device = device.clone();
                (Address { device, parcels }, receiver)
            };
            devices.iter().map(address).unzip()
        };
        let ((ranks, visitors), (owners, returned)) = (addresses(), addresses());
        let receivers = visitors.into_iter().zip(returned);
        let link = |(rank, (visitors, returned))| Self {
            rank,
            zigzag,
            device: devices[rank].clone(),
            courier: courier.clone(),
            next: ranks[(rank + 1) % devices.len()].clone(),
            visitors,
            owners: owners.clone(),
            returned,
            sent: Vec::new(),
        };
        receivers.enumerate().map(link).collect()
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs `compute` over the keys and values of each rank in ring order, first over the rank's `own`.
    ///
    /// Each step also passes the visiting keys and values on to the next rank. `compute` gets the link, the rank that
    /// owns the keys and values, the attention call, and the keys and values.
    ///
    /// # Errors
    /// Returns the error of `compute`, or an error if another rank has stopped.
    pub fn circulate(
        &mut self,
        own: Pair,
        mut compute: impl FnMut(&mut Self, usize, &Call, &Pair) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut visitor = own;
        for step in 0..self.zigzag.ranks() {
            let is_last = step + 1 == self.zigzag.ranks();
            // The copy is requested before the kernels are launched. A copy that starts later may wait for a free
            // multiprocessor, because NCCL copies by kernels.
            if !is_last {
                self.send(self.next.clone(), visitor.clone())?;
            }
            let owner = self.zigzag.owner(self.rank, step);
            let call = self.zigzag.call(self.rank, owner);
            compute(self, owner, &call, &visitor)?;
            // Without the flush, Burn's fusion would keep the kernels until the sync, and nothing would overlap.
            self.device.flush()?;
            if !is_last {
                visitor = self.visitors.recv().map_err(|_| Stopped)?.pair;
            }
        }
        Ok(())
    }

    /// Sends the gradients of visiting keys and values to their owner.
    ///
    /// # Errors
    /// Returns an error if the courier has stopped.
    pub fn return_gradients(&mut self, owner: usize, gradients: Pair) -> Result<(), Error> {
        self.send(self.owners[owner].clone(), gradients)
    }

    /// Receives the gradients that the other ranks have computed, in the order of the ranks. Each item has the key rows
    /// of the gradients.
    ///
    /// # Errors
    /// Returns an error if another rank has stopped.
    pub fn returned_gradients(&mut self) -> Result<Vec<(Range<usize>, Pair)>, Error> {
        // A rank that waits with open channels to other ranks would keep those ranks waiting if a third rank stops.
        self.owners.clear();
        let others = 1..self.zigzag.ranks();
        let parcels = others.map(|_| self.returned.recv().map_err(|_| Stopped));
        let mut parcels = parcels.collect::<Result<Vec<_>, _>>()?;
        parcels.sort_by_key(|parcel| parcel.sender);
        let with_rows = |parcel: Parcel| {
            let call = self.zigzag.call(parcel.sender, self.rank);
            (call.keys, parcel.pair)
        };
        Ok(parcels.into_iter().map(with_rows).collect())
    }

    /// Closes the link and returns the tensors that the rank has sent. The memory of these tensors must not be reused
    /// before all ranks have finished, because CubeCL does not wait for a copy that reads freed memory.
    pub fn close(self) -> Vec<Pair> {
        self.sent
    }

    fn send(&mut self, to: Address, pair: Pair) -> Result<(), Error> {
        self.sent.push(pair.clone());
        let sender = self.rank;
        self.courier.submit(move || {
            let pair = pair.map(|tensor| tensor.to_device(&to.device));
            // The result is ignored. The call fails only if the receiver's pass has failed, and the receiver reports why.
            let _ = to.parcels.send(Parcel { sender, pair });
        })?;
        Ok(())
    }
}
