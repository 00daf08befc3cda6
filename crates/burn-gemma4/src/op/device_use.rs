//! The lock that separates captures of CUDA graphs from all other uses of devices in the process.
//!
//! CubeCL 0.11 captures in CUDA's global mode. While one thread captures, allocations, synchronizations and module
//! loads of all other threads fail, for all devices. They also invalidate the capture. A thread that uses a device
//! beside other threads therefore shares this lock, and a capture has the lock alone.

use burn::tensor::Device;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The lock, and the devices that threads have used under the lock.
static DEVICES: RwLock<Vec<Device>> = RwLock::new(Vec::new());

thread_local! {
    static CURRENT: RefCell<Current> = const { RefCell::new(Current { uses: 0, shared: None }) };
}

/// The uses of the current thread.
struct Current {
    /// The number of [`DeviceUse`] values of this thread, and of captures in progress.
    uses: usize,
    /// The thread's share of the lock. `None` without uses, during a pause and during a capture.
    shared: Option<RwLockReadGuard<'static, Vec<Device>>>,
}

/// The use of a device by the current thread, beside threads that use other devices. As long as this value exists, no
/// other thread that has such a value captures a CUDA graph.
///
/// A capture makes allocations, synchronizations and module loads of all other threads fail, on all CUDA devices of the
/// process. A process with one model on each of several devices therefore needs this value. Each thread creates the
/// value before it uses its device, and drops the value from time to time. A capture waits until the values of all other
/// threads have been dropped or [paused](Self::pause). A thread can have several values.
///
/// Threads without this value neither wait nor are waited for. A process in which one thread uses devices needs no value.
/// Threads that wait for each other on their devices, as in training on several GPUs, must not have one.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_gemma4::DeviceUse;
///
/// let device = Device::flex();
/// let (sender, requests) = std::sync::mpsc::channel();
/// sender.send(2.0).unwrap();
/// let in_use = DeviceUse::begin(&device);
/// // The wait for a request does not delay captures of other threads.
/// let request: f32 = DeviceUse::pause(|| requests.recv()).unwrap();
/// let double = Tensor::<1>::from_floats([request], &device) * 2.0;
/// drop(in_use);
/// assert_eq!(double.into_scalar::<f32>(), 4.0);
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceUse {
    /// The share of the lock belongs to the thread, so the value must not move to another thread.
    thread: PhantomData<*const ()>,
}

impl DeviceUse {
    /// Waits until no other thread captures a CUDA graph, and begins a use of `device`.
    pub fn begin(device: &Device) -> Self {
        CURRENT.with_borrow_mut(|current| {
            // A thread that captures has uses but no share, because it has the lock alone.
            let needs_share = match &current.shared {
                Some(devices) => !devices.contains(device),
                None => current.uses == 0,
            };
            if needs_share {
                // Return the old share first, because the list of devices must change.
                current.shared = None;
                current.shared = Some(share(device));
            }
            current.uses += 1;
        });
        Self {
            thread: PhantomData,
        }
    }

    /// Runs `wait` while captures of other threads may begin. `wait` must not use a device. Without a use of the
    /// current thread, `wait` runs as usual.
    pub fn pause<T>(wait: impl FnOnce() -> T) -> T {
        let _paused = Paused::begin();
        wait()
    }
}

impl Drop for DeviceUse {
    fn drop(&mut self) {
        end();
    }
}

/// Ends a use of the current thread. Returns the thread's share of the lock after the last use.
fn end() {
    CURRENT.with_borrow_mut(|current| {
        current.uses -= 1;
        if current.uses == 0 {
            current.shared = None;
        }
    });
}

/// Waits for a share of the lock, and adds `device` to the known devices.
fn share(device: &Device) -> RwLockReadGuard<'static, Vec<Device>> {
    loop {
        // Ignore a poisoned lock: each change of the list is a single push.
        let devices = DEVICES.read().unwrap_or_else(PoisonError::into_inner);
        if devices.contains(device) {
            return devices;
        }
        drop(devices);
        let mut devices = DEVICES.write().unwrap_or_else(PoisonError::into_inner);
        if !devices.contains(device) {
            devices.push(device.clone());
        }
    }
}

/// A time in which the current thread has no share of the lock. Dropping this value waits for the share again.
struct Paused {
    had_share: bool,
}

impl Paused {
    fn begin() -> Self {
        let shared = CURRENT.with_borrow_mut(|current| current.shared.take());
        Self {
            had_share: shared.is_some(),
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        if self.had_share {
            let shared = DEVICES.read().unwrap_or_else(PoisonError::into_inner);
            CURRENT.with_borrow_mut(|current| current.shared = Some(shared));
        }
    }
}

/// Runs a capture on `device` while no other thread with a [`DeviceUse`] uses a device. The thread returns its own share
/// of the lock before it waits, so two threads that want to capture do not wait for each other.
///
/// Without a share, `capture` runs at once. Waiting could block training: a rank that captures waits for the gradients of
/// another rank, which could wait for its own capture.
#[cfg(any(test, feature = "cube"))]
pub(crate) fn capture_alone<T>(device: &Device, capture: impl FnOnce() -> T) -> T {
    /// Counts the capture as a use, so that a use within the capture does not wait for the capture's own lock.
    struct Capturing;
    impl Drop for Capturing {
        fn drop(&mut self) {
            end();
        }
    }

    let paused = Paused::begin();
    if !paused.had_share {
        return capture();
    }
    let devices = DEVICES.write().unwrap_or_else(PoisonError::into_inner);
    CURRENT.with_borrow_mut(|current| current.uses += 1);
    let _capturing = Capturing;
    // CubeCL runs launches and allocations of a device on a thread of its own. Wait until these threads have done what
    // the other threads queued before they returned their shares.
    for other in devices.iter().filter(|other| *other != device) {
        // Ignore an error: the thread that uses the device gets the same error.
        let _ = other.sync();
    }
    // Drops run in reverse order: the capture ends as a use, the lock is free, and the thread waits for its share.
    capture()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    fn has_share() -> bool {
        CURRENT.with_borrow(|current| current.shared.is_some())
    }

    /// Counts the threads that use a device, and the threads that capture.
    #[derive(Default)]
    struct Counts {
        users: AtomicUsize,
        captures: AtomicUsize,
    }

    impl Counts {
        /// Uses a device for some time, and checks that no thread captures in this time.
        fn use_device(&self) {
            self.users.fetch_add(1, Ordering::SeqCst);
            for _ in 0..20 {
                assert_eq!(self.captures.load(Ordering::SeqCst), 0);
                thread::yield_now();
            }
            self.users.fetch_sub(1, Ordering::SeqCst);
        }

        /// Captures for some time, and checks that this thread is alone.
        fn capture(&self) {
            assert_eq!(self.captures.fetch_add(1, Ordering::SeqCst), 0);
            for _ in 0..20 {
                assert_eq!(self.users.load(Ordering::SeqCst), 0);
                thread::yield_now();
            }
            self.captures.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn captures_of_threads_exclude_all_uses_and_do_not_block_each_other() {
        let (counts, device) = (Counts::default(), Device::flex());
        thread::scope(|scope| {
            for thread in 0..4 {
                let (counts, device) = (&counts, &device);
                scope.spawn(move || {
                    for round in 0..200 {
                        let _in_use = DeviceUse::begin(device);
                        counts.use_device();
                        // All threads want to capture in the same rounds, as engines with equal requests do.
                        if round % 10 == 0 || (round + thread) % 7 == 0 {
                            capture_alone(device, || counts.capture());
                        }
                        counts.use_device();
                    }
                });
            }
        });
        assert!(!has_share());
    }

    #[test]
    fn capture_waits_for_a_use_and_not_for_a_pause() {
        let device = Device::flex();
        let (to_user, from_capture) = mpsc::channel::<()>();
        let (to_capture, from_user) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let of_user = device.clone();
            scope.spawn(move || {
                let _in_use = DeviceUse::begin(&of_user);
                to_capture.send(()).expect("the capture waits");
                // The pause ends after the capture. Without the pause, neither thread would go on.
                DeviceUse::pause(|| from_capture.recv()).expect("the capture has run");
                assert!(has_share());
            });
            from_user.recv().expect("the user has begun");
            let _in_use = DeviceUse::begin(&device);
            capture_alone(&device, || to_user.send(())).expect("the user waits");
        });
    }

    #[test]
    fn uses_within_uses_and_captures_do_not_wait_for_their_own_thread() {
        let device = Device::flex();
        let outer = DeviceUse::begin(&device);
        let inner = DeviceUse::begin(&device);
        drop(outer);
        assert!(has_share());
        capture_alone(&device, || {
            let within = DeviceUse::begin(&device);
            assert!(!has_share());
            assert!(!DeviceUse::pause(has_share));
            drop(within);
        });
        assert!(has_share());
        drop(inner);
        assert!(!has_share());
        assert!(!DeviceUse::pause(has_share));
    }

    #[test]
    fn capture_that_panics_frees_the_lock() {
        let device = Device::flex();
        let in_use = DeviceUse::begin(&device);
        let panic = AssertUnwindSafe(|| capture_alone(&device, || panic!("the launch failed")));
        assert!(catch_unwind(panic).is_err());
        assert!(has_share());
        drop(in_use);
        let other = thread::spawn(move || {
            let _in_use = DeviceUse::begin(&device);
            capture_alone(&device, has_share)
        });
        assert!(!other.join().expect("the thread ends"));
    }

    #[test]
    fn capture_without_a_use_does_not_wait_for_uses_of_other_threads() {
        let device = Device::flex();
        let _in_use = DeviceUse::begin(&device);
        let of_training = device.clone();
        let training = thread::spawn(move || capture_alone(&of_training, || 3));
        assert_eq!(training.join().expect("the thread ends"), 3);
    }
}
