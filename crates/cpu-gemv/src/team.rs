//! A team of threads that stay alive between products. A product divides its work into parts. The calling thread and
//! the team's threads take these parts one by one.
//!
//! A team serves one call of [`parallel`] at a time. If a call finds the team busy, the call's own thread computes all
//! parts.

use std::{
    cell::UnsafeCell,
    num::NonZero,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Condvar, Mutex, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The time for which an idle thread polls for work before the thread sleeps. A sleeping thread needs time to wake. The
/// pauses between the many products of a decode step are shorter than this time, so the threads stay awake.
const SPIN: Duration = Duration::from_micros(50);

/// The unit of the counter in the upper bits of `Team::state`. The counter increases when a call opens, and again when
/// the call closes. An odd count therefore means that a call is open. The low 16 bits of the state count the threads
/// inside a call.
const CALL: u64 = 1 << 16;

/// The work of a call: the function that computes a part, and the number of parts.
#[derive(Clone, Copy)]
struct Call {
    work: *const (dyn Fn(usize) + Sync),
    parts: usize,
}

struct Team {
    state: AtomicU64,
    /// The index of the next part that no thread has taken.
    next: AtomicUsize,
    call: UnsafeCell<Option<Call>>,
    has_panicked: AtomicBool,
    /// The number of sleeping threads. The mutex `sleep` prevents a lost wake-up. A thread checks the state under the
    /// mutex before it sleeps, and a caller locks the mutex before it wakes the threads.
    sleeping: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    /// The mutex that the owner holds. The owner is the thread whose call the team serves.
    owner: Mutex<()>,
    threads: usize,
}

// SAFETY: only the owner writes `call`, and only while no thread is inside a call. Other threads read `call` only after
// they have entered an open call, and the owner opens a call only after the write.
unsafe impl Sync for Team {}

/// Returns the number of threads that compute a product, including the caller's thread.
pub fn threads() -> usize {
    team().threads
}

/// Calls `work` with each index below `parts`, on all CPU cores if the team is not busy. Returns when `work` has
/// returned for every index.
///
/// # Panics
/// Panics if `work` panics.
pub fn parallel(parts: usize, work: impl Fn(usize) + Sync) {
    let team = team();
    let owner = (parts > 1 && team.threads > 1).then(|| team.owner.try_lock());
    match owner {
        Some(Ok(_owner)) => team.run(parts, &work),
        Some(Err(TryLockError::Poisoned(error))) => {
            // An earlier call panicked. `Close` has ended that call, so the team is ready for another call.
            let _owner = error.into_inner();
            team.run(parts, &work);
        }
        _ => (0..parts).for_each(work),
    }
}

fn team() -> &'static Team {
    static TEAM: OnceLock<&'static Team> = OnceLock::new();
    TEAM.get_or_init(|| {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let team: &'static Team = Box::leak(Box::new(Team {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            call: UnsafeCell::new(None),
            has_panicked: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            owner: Mutex::new(()),
            threads: cores,
        }));
        for index in 1..cores {
            // Ignore an error: if a thread does not start, the other threads compute all parts.
            let _ = thread::Builder::new()
                .name(format!("cpu-gemv-{index}"))
                .spawn(|| team.serve());
        }
        team
    })
}

impl Team {
    /// Runs a call. The caller must hold the mutex `owner`.
    fn run(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: the transmute only extends the lifetime of the reference. `Close` ends the call before this function
        // returns or unwinds, and no thread reads the reference afterwards.
        let work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync)>(
                work,
            )
        };
        let call = Call { work, parts };
        // SAFETY: no call is open and no thread is inside a call, because the previous owner has closed its call.
        unsafe { *self.call.get() = Some(call) };
        self.next.store(0, Ordering::Relaxed);
        self.has_panicked.store(false, Ordering::Relaxed);
        self.state.fetch_add(CALL, Ordering::SeqCst);
        let close = Close(self);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
        self.take_parts(call);
        drop(close);
        assert!(
            !self.has_panicked.load(Ordering::Relaxed),
            "cpu-gemv: a thread of the team panicked"
        );
    }

    fn take_parts(&self, call: Call) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= call.parts {
                return;
            }
            // SAFETY: the call is open, so the caller still holds the closure.
            unsafe { (*call.work)(part) };
        }
    }

    /// Serves calls, on a thread of the team.
    fn serve(&self) {
        let mut last = 0;
        loop {
            let Some(state) = self.open_call(last) else {
                continue;
            };
            last = state / CALL;
            // SAFETY: this thread is inside an open call, so the owner does not write `call`.
            if let Some(call) = unsafe { *self.call.get() } {
                let outcome = catch_unwind(AssertUnwindSafe(|| self.take_parts(call)));
                if let Err(payload) = outcome {
                    self.has_panicked.store(true, Ordering::Relaxed);
                    // Do not drop the payload. If the drop panicked, this thread would end inside the call, and the
                    // caller would wait forever.
                    std::mem::forget(payload);
                }
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an open call other than the call `last`, and tries to enter it. Returns the state at which the thread
    /// entered, or `None` if the state changed before the thread could enter.
    fn open_call(&self, last: u64) -> Option<u64> {
        let is_new = |state: u64| state / CALL % 2 == 1 && state / CALL != last;
        let started = Instant::now();
        let mut state = self.state.load(Ordering::Acquire);
        while !is_new(state) {
            for _ in 0..64 {
                std::hint::spin_loop();
            }
            if started.elapsed() > SPIN {
                let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                while !is_new(self.state.load(Ordering::SeqCst)) {
                    guard = self
                        .wake
                        .wait(guard)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
            }
            state = self.state.load(Ordering::Acquire);
        }
        let entered =
            self.state
                .compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
        entered.ok()
    }
}

/// A guard that closes the open call when the guard is dropped. The guard then waits until no thread is inside the
/// call.
struct Close<'a>(&'a Team);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        let state = &self.0.state;
        state.fetch_add(CALL, Ordering::AcqRel);
        let mut turns = 0u32;
        while !state.load(Ordering::Acquire).is_multiple_of(CALL) {
            turns += 1;
            match turns {
                ..2000 => std::hint::spin_loop(),
                // Yield, because a thread inside the call may have lost its core to another process.
                _ => thread::yield_now(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_from_several_threads_runs_each_part_once() {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for parts in (0..300).chain([5000]) {
                        let counts: Vec<_> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                        parallel(parts, |part| {
                            counts[part].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(
                            counts
                                .iter()
                                .all(|count| count.load(Ordering::Relaxed) == 1)
                        );
                    }
                });
            }
        });
    }

    #[test]
    fn parallel_within_a_part_runs_on_its_thread() {
        let count = AtomicUsize::new(0);
        parallel(8, |_| {
            parallel(8, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 64);
    }

    #[test]
    fn parallel_after_a_panic_uses_all_threads() {
        let panics = || parallel(100, |part| assert!(part != 50, "part 50 panics"));
        assert!(catch_unwind(panics).is_err());
        let (count, helpers) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let caller = thread::current().id();
        let work = |_| {
            count.fetch_add(1, Ordering::Relaxed);
            if thread::current().id() != caller {
                helpers.fetch_add(1, Ordering::Relaxed);
            }
            thread::sleep(Duration::from_millis(1));
        };
        // Repeat the call, because another test may own the team. In that case, all parts run on the thread of this
        // test.
        let mut calls = 0;
        while calls < 100 && (calls == 0 || threads() > 1 && helpers.load(Ordering::Relaxed) == 0) {
            parallel(20, work);
            calls += 1;
        }
        assert_eq!(count.into_inner(), 20 * calls);
        assert!(threads() == 1 || helpers.into_inner() > 0);
    }
}
