//! NCCL, through cudarc: numbers go from one GPU's memory to another's.
//!
//! CubeCL's own collectives are among the devices of one process: they keep the identifier of a group to themselves.

use super::{exchange::Exchange, place::Place};
use crate::Error;
use burn::{
    backend::{Cube, CubeDevice, DispatchDevice},
    tensor::{DType, Device, Tensor},
};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use cudarc::{
    driver::{CudaContext, CudaStream},
    nccl::{
        result::{self, NcclError},
        sys::{ncclComm, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId},
    },
};
use std::{
    ffi::c_char,
    mem::MaybeUninit,
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicPtr, Ordering},
    },
    thread,
};

/// A group of processes, with a GPU each.
pub struct Nccl {
    /// Nothing once it is aborted.
    group: AtomicPtr<ncclComm>,
    /// NCCL lets any thread use a communicator, one at a time, but for an abort.
    sums: Mutex<()>,
    stream: Arc<CudaStream>,
}

fn named(call: &str) -> impl Fn(NcclError) -> Error {
    let call = call.to_owned();
    move |error| format!("NCCL's {call} failed: {error:?}").into()
}

/// What a new group is known by.
///
/// # Errors
/// Where NCCL does not start.
pub fn identifier() -> Result<Vec<u8>, Error> {
    let id = result::get_uniqueid().map_err(named("ncclGetUniqueId"))?;
    Ok(id.internal.iter().map(|byte| *byte as u8).collect())
}

impl Nccl {
    /// The group of an [`identifier`], which all its processes join at once.
    ///
    /// # Errors
    /// Where `device` is not CUDA's, or NCCL fails.
    pub fn join(place: Place, device: &Device, identifier: &[u8]) -> Result<Self, Error> {
        let DispatchDevice::Cube(CubeDevice::Cuda(device)) = device.as_dispatch() else {
            return Err("NCCL is for CUDA's devices".into());
        };
        let mut id = ncclUniqueId { internal: [0; 128] };
        if identifier.len() != id.internal.len() {
            return Err("the first process has no NCCL".into());
        }
        for (to, from) in id.internal.iter_mut().zip(identifier) {
            *to = *from as c_char;
        }
        // CubeCL's context: the device's primary one. It is current in this thread from here on.
        let context = CudaContext::new(device.index)?;
        let stream = context.new_stream()?;
        let mut group = MaybeUninit::uninit();
        let (size, rank) = (i32::try_from(place.size)?, i32::try_from(place.rank)?);
        // SAFETY: `group` is written where the call succeeds; each of `size` processes joins once, with its own rank.
        let group = unsafe {
            result::comm_init_rank(group.as_mut_ptr(), size, id, rank)
                .map_err(named("ncclCommInitRank"))?;
            group.assume_init()
        };
        Ok(Self {
            group: AtomicPtr::new(group),
            sums: Mutex::new(()),
            stream,
        })
    }

    /// The communicator. Where it was aborted, the process ends, and this thread waits for that.
    fn group(&self) -> ncclComm_t {
        loop {
            let group = self.group.load(Ordering::Acquire);
            if !group.is_null() {
                return group;
            }
            thread::park();
        }
    }
}

/// Where the numbers are, when whatever was to be done before is done.
fn resolved(numbers: Tensor<1>) -> Result<CubeTensor, Error> {
    let numbers = numbers
        .try_into_primitive::<Cube>()
        .map_err(|error| format!("{error:?}"))?;
    let client = numbers.client.clone();
    Ok(client.resolve_tensor_float::<CubeBackend>(numbers))
}

fn pointer(numbers: &CubeTensor) -> Result<u64, Error> {
    type Server = <CudaRuntime as Runtime>::Server;
    let resource = numbers
        .client
        .get_resource::<Server>(numbers.handle.clone());
    let resource = resource.map_err(|error| error.to_string())?;
    Ok(resource.resource().ptr)
}

impl Exchange for Nccl {
    fn sum(&self, numbers: Tensor<1>) -> Result<Tensor<1>, Error> {
        let (count, device) = (numbers.dims()[0], numbers.device());
        let dtype = match numbers.dtype() {
            DType::F32 => ncclDataType_t::ncclFloat32,
            DType::F16 => ncclDataType_t::ncclFloat16,
            DType::BF16 => ncclDataType_t::ncclBfloat16,
            other => return Err(format!("NCCL does not add up {other:?} here").into()),
        };
        // Memory of its own: what is summed may be a gradient that somebody else sees.
        let sum = Tensor::<1>::zeros([count], (&device, numbers.dtype()));
        let from = into_contiguous(resolved(numbers)?);
        let to = resolved(sum.clone())?;
        let (source, target) = (pointer(&from)?, pointer(&to)?);
        device.sync()?;
        let one_sum = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream.context().bind_to_thread()?;
        let group = self.group();
        // SAFETY: both are `count` numbers of `dtype` side by side, which live beyond the wait below; all that writes or reads
        // them on CubeCL's streams has ended, and `sum` alone is a handle to the target.
        let reduced = unsafe {
            result::all_reduce(
                source as *const _,
                target as *mut _,
                count,
                dtype,
                ncclRedOp_t::ncclSum,
                group,
                self.stream.cu_stream().cast(),
            )
        };
        let ended = self.stream.synchronize();
        // What an abort leaves is no sum, and no error of its own.
        self.group();
        reduced.map_err(named("ncclAllReduce"))?;
        ended?;
        drop((from, to, one_sum));
        Ok(sum)
    }

    /// From any thread: it ends the kernels that wait for other processes.
    fn abort(&self) {
        let group = self.group.swap(ptr::null_mut(), Ordering::AcqRel);
        if !group.is_null() {
            // SAFETY: it is aborted once, and nobody takes it any more. Who waits within it, or for its kernels, is to end.
            let _ = unsafe { result::comm_abort(group) };
        }
    }
}

impl Drop for Nccl {
    /// Every sum has been waited for, and nobody else has the communicator.
    fn drop(&mut self) {
        self.abort();
    }
}
