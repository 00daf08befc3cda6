//! PTX's types, memory spaces, and special registers.

/// The type of an instruction's operands. The types `B8` to `B64` are bits without an interpretation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    Predicate,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
}

impl Type {
    /// Returns the type with this PTX name, given without the leading dot, or `None` if the name is unknown.
    pub fn of(text: &str) -> Option<Self> {
        Some(match text {
            "pred" => Self::Predicate,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Returns the size of a value in memory in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Predicate | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::BF16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    pub fn bits(self) -> u32 {
        8 * self.bytes() as u32
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64) || self.is_half()
    }

    /// Returns true if the type consists of one or two 16-bit floats.
    pub fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::F16x2 | Self::BF16 | Self::BF16x2)
    }

    /// Returns the class of the registers that can store this type.
    pub fn class(self) -> Class {
        match self {
            Self::Predicate => Class::Predicate,
            _ if self.bits() == 64 => Class::Double,
            _ => Class::Word,
        }
    }
}

/// The classes of registers by width per lane: predicates (1 bit), words (up to 32 bits), and doubles (64 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Predicate,
    Word,
    Double,
}

/// A register of a warp, as the index of its row among all rows of the register's class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    Predicate(u32),
    Word(u32),
    Double(u32),
}

impl Register {
    pub fn class(self) -> Class {
        match self {
            Self::Predicate(_) => Class::Predicate,
            Self::Word(_) => Class::Word,
            Self::Double(_) => Class::Double,
        }
    }
}

/// The memory spaces of PTX. The emulator places constant memory in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Parameter,
}

/// The size of a window in bytes. A window is the range of generic addresses of one emulated memory space. All
/// addresses of the emulator's own process, and therefore of global memory, are below the first window.
const WINDOW: u64 = 1 << 60;

/// The address at which shared memory starts. Addresses below it are invalid, so the null address 0 is invalid in
/// shared memory as well.
pub const SHARED_START: u64 = 1024;

impl Space {
    /// Returns the first generic address of the space's window.
    pub fn window(self) -> u64 {
        match self {
            Self::Generic | Self::Global => 0,
            Self::Shared => WINDOW,
            Self::Local => 2 * WINDOW,
            Self::Parameter => 3 * WINDOW,
        }
    }

    /// Returns the memory space of a generic address, and the address relative to the start of that space.
    pub fn of_generic(address: u64) -> (Self, u64) {
        let space = match address / WINDOW {
            1 => Self::Shared,
            2 => Self::Local,
            3 => Self::Parameter,
            _ => Self::Global,
        };
        (space, address - space.window())
    }
}

/// The special registers, such as the index of a thread in its block. The axes x, y and z are numbered 0, 1 and 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    Thread(usize),
    CubeSize(usize),
    Cube(usize),
    GridSize(usize),
    Lane,
    Warp,
    LanesBelow,
    LanesUpTo,
    LanesAbove,
    LanesFrom,
    OwnLane,
}

impl Special {
    /// Returns the special register with this PTX name, or `None` if the name is unknown.
    pub fn of(name: &str) -> Option<Self> {
        let name = name.strip_prefix('%')?;
        if let Some((register, axis)) = name.split_once('.') {
            let axis = ["x", "y", "z"].iter().position(|name| *name == axis)?;
            return Some(match register {
                "tid" => Self::Thread(axis),
                "ntid" => Self::CubeSize(axis),
                "ctaid" => Self::Cube(axis),
                "nctaid" => Self::GridSize(axis),
                _ => return None,
            });
        }
        Some(match name {
            "laneid" => Self::Lane,
            "warpid" => Self::Warp,
            "lanemask_lt" => Self::LanesBelow,
            "lanemask_le" => Self::LanesUpTo,
            "lanemask_gt" => Self::LanesAbove,
            "lanemask_ge" => Self::LanesFrom,
            "lanemask_eq" => Self::OwnLane,
            _ => return None,
        })
    }
}
