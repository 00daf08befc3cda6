//! Integers on their way to the host, while the device goes on.

use crate::Gemma4Error;
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

/// A copy that has been put on the device, behind what makes the integers and before whatever comes after.
pub(crate) struct Reading {
    /// Themselves.
    pub numbers: Tensor<1, Int>,
    /// `None` once they are there.
    copied: Option<Copied>,
}

type Copied = Pin<Box<dyn Future<Output = Result<Vec<i32>, ServerError>>>>;

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading").finish_non_exhaustive()
    }
}

impl Reading {
    /// Of 32-bit integers on a CubeCL device, `[count]`. Burn's own reads copy when the host looks, which is behind what has been put on the device meanwhile.
    pub fn begin(numbers: Tensor<1, Int>) -> Self {
        assert_eq!(numbers.dtype(), DType::I32, "32 bits each");
        let tensor = numbers.clone().try_into_primitive::<Cube>();
        let tensor = tensor.expect("kernels made them");
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

    /// Waits for them.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn wait(mut self) -> Result<Vec<i32>, Gemma4Error> {
        let copied = self.copied.take().expect("they are waited for once");
        block_on(copied)
            .map_err(|error| Gemma4Error::Device(format!("it computed no tokens: {error}")))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // What makes them writes what another thread may have next, whose work the device does not order after this.
        if let Some(copied) = self.copied.take() {
            // A device that failed says so to whoever asks it next.
            let _ = block_on(copied);
        }
    }
}

/// The client of a tensor's device, for as long as the program runs: what a copy on its way is told by borrows the one that began it.
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
