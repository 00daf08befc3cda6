//! The self-check of a device's matrix units. It finds drivers that multiply fragments (`cubecl::cmma`) wrongly, and
//! devices on which fragments are slower than the unit engine.
//!
//! The first call that the cmma engine would serve runs the check, for the tiles of this call alone. A check therefore
//! compiles only the kernels of one pass and should take about a second. Other head sizes, dtypes and passes are checked
//! when a call first needs them.
//!
//! The check launches cmma's kernels directly with the plan of the call, so that exactly the tiles of the call are
//! checked and no selection runs inside the check. Three conditions must hold:
//!
//! 1. The results of a small problem match the definition on the host, in f64 (`definition.rs`, `compare.rs`). The
//!    problem has partial tiles, a causal mask, a GQA group, and row maxima that grow from block to block. A verdict
//!    holds for all calls with these tiles, so the problem uses every row and column of their fragments.
//! 2. No launch fails or panics.
//! 3. A larger problem is not slower than with the unit engine. Emulated fragments are not timed.
//!
//! Verdicts stay on disk (`verdict_file.rs`). The file says "running" while a check runs. If a driver hangs or crashes
//! the process, later processes find this entry and do not use the tiles.

mod compare;
mod definition;
mod driver;
mod measure;
mod run;
mod sample;
mod selection;
mod verdict_file;

pub(crate) use self::selection::select_checked;
