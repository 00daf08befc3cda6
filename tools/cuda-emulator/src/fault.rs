//! The faults that end a kernel launch.

/// The reason why a kernel cannot continue, without the location in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Invalid or unknown PTX.
    #[error("invalid or unknown PTX: {0}")]
    Syntax(String),
    /// An instruction that the emulator does not support, or an instruction whose modifiers or operands it does not
    /// support.
    #[error("not emulated: {0}")]
    Unsupported(String),
    /// An access that reaches outside of its memory, such as shared memory.
    #[error("{bytes} bytes at {address:#x} are not in {memory}")]
    OutOfBounds {
        memory: &'static str,
        address: u64,
        bytes: usize,
    },
    /// An address that is not aligned to the size of the access.
    #[error("{bytes} bytes at {address:#x} are not aligned")]
    Misaligned { address: u64, bytes: usize },
    /// A barrier that is used against the rules of PTX.
    #[error("{0}")]
    Barrier(String),
    /// Lanes or warps that wait for each other.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// An argument value that the instruction does not accept.
    #[error("{0}")]
    Argument(String),
    /// A `trap` instruction in the kernel.
    #[error("the kernel trapped")]
    Trap,
    /// The kernel executed more instructions than the limit.
    #[error("more than {0} instructions: the kernel does not seem to end")]
    Endless(u64),
}

impl Fault {
    /// Appends `place`, the location in the PTX, to the message of a syntax fault or an unsupported instruction.
    /// Returns any other fault unchanged.
    pub fn at(self, place: &str) -> Self {
        match self {
            Self::Syntax(what) => Self::Syntax(what + place),
            Self::Unsupported(what) => Self::Unsupported(what + place),
            fault => fault,
        }
    }
}

/// A fault with its location in the launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {kernel}, cube {cube:?}: {fault}{}", self.instruction())]
pub struct LocatedFault {
    pub kernel: String,
    pub cube: [u32; 3],
    /// The index of the warp and the text of the instruction, or `None` if no single warp caused the fault.
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
