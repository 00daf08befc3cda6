//! Reads and writes of contiguous bytes by a whole warp. The matrix instructions use these reads and writes.

use super::Cube;
use super::memory::host_bytes;
use super::warp::Warp;
use crate::fault::Fault;
use crate::ptx::Space;

impl Cube<'_> {
    /// Reads contiguous bytes from shared or global memory.
    ///
    /// # Errors
    /// Returns an error if some of the bytes are outside of the memory.
    pub fn read_line(
        &mut self,
        warp: &Warp,
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Result<Vec<u8>, Fault> {
        match place(space, address) {
            (Space::Shared, address) => {
                let at = self.shared.offset(address, bytes)?;
                self.shared.reading(&warp.clock, at, bytes);
                Ok(self.shared.bytes()[at..at + bytes].to_vec())
            }
            (Space::Global, address) => {
                self.launch.check_global(address, bytes)?;
                // SAFETY: the check above found the bytes in an allocation. No other code writes them during the
                // copy.
                Ok(unsafe { host_bytes(address, bytes) }.to_vec())
            }
            (space, _) => Err(Fault::Unsupported(format!("a tile in {space:?}"))),
        }
    }

    /// Writes contiguous bytes to shared or global memory.
    ///
    /// # Errors
    /// Returns an error if some of the bytes are outside of the memory.
    pub fn write_line(
        &mut self,
        warp: &Warp,
        space: Space,
        address: u64,
        data: &[u8],
    ) -> Result<(), Fault> {
        self.events += 1;
        match place(space, address) {
            (Space::Shared, address) => {
                let at = self.shared.offset(address, data.len())?;
                self.shared.write(&warp.clock, at, data);
            }
            (Space::Global, address) => {
                self.launch.check_global(address, data.len())?;
                // SAFETY: the check above found the bytes in an allocation. No references into allocations exist.
                unsafe {
                    std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len());
                }
            }
            (space, _) => return Err(Fault::Unsupported(format!("a tile in {space:?}"))),
        }
        Ok(())
    }
}

fn place(space: Space, address: u64) -> (Space, u64) {
    match space {
        Space::Generic => Space::of_generic(address),
        space => (space, address),
    }
}
