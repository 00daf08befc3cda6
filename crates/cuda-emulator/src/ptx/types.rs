//! The types of PTX's numbers, the spaces of its memory, and what a thread can ask about itself.

/// How an instruction reads a number. `B` is bits without a meaning.
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
    /// The type that PTX spells so, without its dot.
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

    /// Bytes in memory.
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

    /// Whether it is of 16-bit floats, one or two.
    pub fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::F16x2 | Self::BF16 | Self::BF16x2)
    }

    /// The registers that hold it.
    pub fn class(self) -> Class {
        match self {
            Self::Predicate => Class::Predicate,
            _ if self.bits() == 64 => Class::Double,
            _ => Class::Word,
        }
    }
}

/// The kinds of registers: one bit a lane; up to 32 bits; 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Predicate,
    Word,
    Double,
}

/// A register of a warp: the row of its class that holds it, for all lanes.
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

/// The memories of PTX. Constants lie in global memory here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Parameter,
}

/// Generic addresses of the spaces that are not the host's own memory start here. No process has addresses so high.
const WINDOW: u64 = 1 << 60;

/// Offsets into shared memory start here, so that 0 is an address of nothing there, too.
pub const SHARED_START: u64 = 1024;

impl Space {
    /// Where the space starts among generic addresses.
    pub fn window(self) -> u64 {
        match self {
            Self::Generic | Self::Global => 0,
            Self::Shared => WINDOW,
            Self::Local => 2 * WINDOW,
            Self::Parameter => 3 * WINDOW,
        }
    }

    /// The space of a generic address, and the address in it.
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

/// What a thread can ask about itself and its cube. Axes are 0, 1, 2.
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
    /// The special register that PTX names so.
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
