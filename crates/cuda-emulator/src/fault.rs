//! What ends a launch.

/// Why a kernel cannot go on, without saying where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// PTX that is not understood.
    #[error("PTX that is not understood: {0}")]
    Syntax(String),
    /// An instruction, or a form of one, that is not emulated.
    #[error("not emulated: {0}")]
    Unsupported(String),
    /// An access outside of its memory.
    #[error("{bytes} bytes at {address:#x} are not in {memory}")]
    OutOfBounds {
        memory: &'static str,
        address: u64,
        bytes: usize,
    },
    /// An address that is no multiple of what is accessed.
    #[error("{bytes} bytes at {address:#x} are not aligned")]
    Misaligned { address: u64, bytes: usize },
    /// A barrier used against its rules.
    #[error("{0}")]
    Barrier(String),
    /// Lanes or warps that wait for each other.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// An argument that the instruction does not take.
    #[error("{0}")]
    Argument(String),
    /// The kernel's own `trap`.
    #[error("the kernel trapped")]
    Trap,
    /// More instructions than any kernel is given.
    #[error("more than {0} instructions: the kernel does not seem to end")]
    Endless(u64),
}

impl Fault {
    /// The same; of what is not understood or not emulated, `place` says where it stands.
    pub fn at(self, place: &str) -> Self {
        match self {
            Self::Syntax(what) => Self::Syntax(what + place),
            Self::Unsupported(what) => Self::Unsupported(what + place),
            fault => fault,
        }
    }
}

/// A fault and where it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {kernel}, cube {cube:?}: {fault}{}", self.instruction())]
pub struct LocatedFault {
    pub kernel: String,
    pub cube: [u32; 3],
    /// The warp and the instruction, where the fault was one warp's.
    pub place: Option<(usize, String)>,
    pub fault: Fault,
}

impl LocatedFault {
    fn instruction(&self) -> String {
        match &self.place {
            Some((warp, instruction)) => format!(", in warp {warp} at `{instruction}`"),
            None => String::new(),
        }
    }
}
