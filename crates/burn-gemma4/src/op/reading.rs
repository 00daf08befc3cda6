//! Asynchronous copies of integers to the host, while the device continues with later launches.

use crate::error::Gemma4Error;
use burn::{
    backend::{Cube, CubeDevice},
    tensor::{DType, Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, tensor::CubeTensor};
use cubecl::{
    client::Client,
    future::block_on,
    server::{CopyDescriptor, ServerError},
};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Mutex, PoisonError},
};

/// A pending copy of integers to the host, enqueued right after the kernels that write the integers.
pub(crate) struct Reading {
    /// The integers on the device, `[count]`.
    pub numbers: Tensor<1, Int>,
    /// The pending copy, or `None` after the copy has been awaited.
    copied: Option<Copied>,
}

type Copied = Pin<Box<dyn Future<Output = Result<Vec<i32>, ServerError>>>>;

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading").finish_non_exhaustive()
    }
}

impl Reading {
    /// Enqueues the copy of 32-bit integers, `[count]`, on a CubeCL device. Burn's own reads enqueue their copy only
    /// when the host asks for the data. Such a copy would also wait for all launches that the host has enqueued between
    /// the writing kernels and this request.
    pub fn begin(numbers: Tensor<1, Int>) -> Self {
        assert_eq!(
            numbers.dtype(),
            DType::I32,
            "`numbers`: expected 32-bit integers"
        );
        let tensor = numbers.clone().try_into_primitive::<Cube>();
        let tensor = tensor.expect("integers of a CubeCL device have a CubeCL primitive");
        let client = tensor.client.clone();
        let tensor = client.resolve_tensor_int::<CubeBackend>(tensor);
        let descriptor = CopyDescriptor::new(
            tensor.handle.clone().binding(),
            tensor.meta.shape().clone(),
            tensor.meta.strides().clone(),
            size_of::<i32>(),
        );
        let copied = lasting_client(&tensor).read_one_tensor_async(descriptor);
        let copied: Copied = Box::pin(async move {
            let bytes = copied.await?;
            let numbers = bytes.chunks_exact(size_of::<i32>());
            let number = |bytes: &[u8]| i32::from_ne_bytes(bytes.try_into().expect("four bytes"));
            Ok(numbers.map(number).collect())
        });
        Self {
            numbers,
            copied: Some(copied),
        }
    }

    /// Waits until the integers have been copied to the host, and returns the integers.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Device`] if the device failed.
    pub fn wait(mut self) -> Result<Vec<i32>, Gemma4Error> {
        let copied = self
            .copied
            .take()
            .expect("`copied` is set until `wait` consumes it");
        block_on(copied)
            .map_err(|error| Gemma4Error::Device(format!("could not read the tokens: {error}")))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // Wait until the copy and the kernels before the copy have ended. Without this wait, the allocator could give
        // the buffers of running kernels to another thread. The device does not order that thread's launches after the
        // running kernels.
        if let Some(copied) = self.copied.take() {
            // Ignore an error: the next operation on the failed device reports it.
            let _ = block_on(copied);
        }
    }
}

/// Returns a client of the tensor's device that is never dropped. Pending copies borrow their client, so the client
/// must outlive every copy.
fn lasting_client(tensor: &CubeTensor) -> &'static Client {
    static CLIENTS: Mutex<Vec<(CubeDevice, &'static Client)>> = Mutex::new(Vec::new());
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = clients.iter().find(|(device, _)| *device == tensor.device);
    if let Some((_, client)) = known {
        return client;
    }
    let client: &'static Client = Box::leak(Box::new(tensor.client.clone()));
    clients.push((tensor.device.clone(), client));
    client
}
