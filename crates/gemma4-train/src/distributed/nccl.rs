//! The all-reduce by NCCL, called through cudarc. Tensors go directly from the memory of one GPU to the memory of another
//! GPU.
//!
//! This module does not use CubeCL's own collectives, because they connect only the devices of one process. Several
//! processes that join one communicator must share its identifier, which CubeCL does not expose.

use crate::{
    Error,
    distributed::{collective::Collective, rank::Rank},
};
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

/// A communicator among processes with one GPU each.
pub struct Nccl {
    /// The communicator, or a null pointer after an abort.
    communicator: AtomicPtr<ncclComm>,
    /// The lock for sums. NCCL allows only one thread at a time to use a communicator, except for an abort.
    sums: Mutex<()>,
    stream: Arc<CudaStream>,
}

fn named(call: &str) -> impl Fn(NcclError) -> Error {
    let call = call.to_owned();
    move |error| format!("NCCL's {call} failed: {error:?}").into()
}

/// Returns the identifier of a new communicator, which every process needs to join.
///
/// # Errors
/// Returns an error if NCCL does not start.
pub fn identifier() -> Result<Vec<u8>, Error> {
    let id = result::get_uniqueid().map_err(named("ncclGetUniqueId"))?;
    Ok(id.internal.iter().map(|byte| *byte as u8).collect())
}

impl Nccl {
    /// Joins the communicator with this [`identifier`]. Returns after all processes have joined.
    ///
    /// # Errors
    /// Returns an error if `device` is not a CUDA device, or if NCCL fails.
    pub fn join(rank: Rank, device: &Device, identifier: &[u8]) -> Result<Self, Error> {
        let DispatchDevice::Cube(CubeDevice::Cuda(device)) = device.as_dispatch() else {
            return Err("NCCL: the device is not a CUDA device; expected a CUDA device".into());
        };
        let mut id = ncclUniqueId { internal: [0; 128] };
        if identifier.len() != id.internal.len() {
            return Err(
                "NCCL: the first process sent no identifier; expected NCCL in every process".into(),
            );
        }
        for (to, from) in id.internal.iter_mut().zip(identifier) {
            *to = *from as c_char;
        }
        // `CudaContext::new` retains the device's primary context, which CubeCL also uses. The context stays current in this
        // thread.
        let context = CudaContext::new(device.index)?;
        let stream = context.new_stream()?;
        let mut communicator = MaybeUninit::uninit();
        let (size, rank) = (i32::try_from(rank.size)?, i32::try_from(rank.global)?);
        // SAFETY: `ncclCommInitRank` writes `communicator` if it succeeds, and `assume_init` runs only in this case. Each of
        // the `size` processes joins once, with its own rank below `size`.
        let communicator = unsafe {
            result::comm_init_rank(communicator.as_mut_ptr(), size, id, rank)
                .map_err(named("ncclCommInitRank"))?;
            communicator.assume_init()
        };
        Ok(Self {
            communicator: AtomicPtr::new(communicator),
            sums: Mutex::new(()),
            stream,
        })
    }

    /// Returns the communicator. After an abort, parks the calling thread until the process ends.
    fn communicator(&self) -> ncclComm_t {
        loop {
            let communicator = self.communicator.load(Ordering::Acquire);
            if !communicator.is_null() {
                return communicator;
            }
            thread::park();
        }
    }
}

/// Returns the CubeCL tensor behind a Burn tensor, after all pending operations on the tensor have been submitted.
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

impl Collective for Nccl {
    fn sum(&self, numbers: Tensor<1>) -> Result<Tensor<1>, Error> {
        let (count, device) = (numbers.dims()[0], numbers.device());
        let dtype = match numbers.dtype() {
            DType::F32 => ncclDataType_t::ncclFloat32,
            DType::F16 => ncclDataType_t::ncclFloat16,
            DType::BF16 => ncclDataType_t::ncclBfloat16,
            other => return Err(format!("NCCL cannot sum {other:?} here").into()),
        };
        // The sum is written to a new tensor, because the input may be a gradient that other code still reads.
        let sum = Tensor::<1>::zeros([count], (&device, numbers.dtype()));
        let from = into_contiguous(resolved(numbers)?);
        let to = resolved(sum.clone())?;
        let (source, target) = (pointer(&from)?, pointer(&to)?);
        device.sync()?;
        let one_sum = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream.context().bind_to_thread()?;
        let communicator = self.communicator();
        // SAFETY: `source` and `target` point to `count` contiguous elements of `dtype`. `from` and `to` keep this memory
        // allocated until `stream.synchronize` below. `device.sync` has ended all earlier work on this memory on CubeCL's
        // streams. No tensor besides `sum` and `to` uses the memory of `target`.
        let reduced = unsafe {
            result::all_reduce(
                source as *const _,
                target as *mut _,
                count,
                dtype,
                ncclRedOp_t::ncclSum,
                communicator,
                self.stream.cu_stream().cast(),
            )
        };
        let ended = self.stream.synchronize();
        // After an abort, this call parks the thread, so that the invalid sum is not used. An error of the sum is not
        // reported, because another process's error has caused it.
        self.communicator();
        reduced.map_err(named("ncclAllReduce"))?;
        ended?;
        drop((from, to, one_sum));
        Ok(sum)
    }

    /// Aborts the communicator. Any thread may call this method. The abort ends the kernels that wait for other processes.
    fn abort(&self) {
        let communicator = self.communicator.swap(ptr::null_mut(), Ordering::AcqRel);
        if !communicator.is_null() {
            // SAFETY: `communicator` comes from `ncclCommInitRank`, because it is not null. After the swap no other thread
            // can load the pointer. A thread that loaded the pointer before may be inside an NCCL call, or may wait for
            // NCCL's kernels. NCCL allows an abort in either case. The thread's sum may fail, which is the purpose of the
            // abort.
            let _ = unsafe { result::comm_abort(communicator) };
        }
    }
}

impl Drop for Nccl {
    /// Frees the communicator. No sum is pending, because no other owner of this value exists any more.
    fn drop(&mut self) {
        self.abort();
    }
}
