//! Loads, stores and atomics in every memory space.

use super::warp::{DoubleRow, LANES, Warp, lanes};
use super::{Cube, Launch};
use crate::fault::Fault;
use crate::numbers::truncate;
use crate::ptx::{Access, Address, Atomic, AtomicOperation, Register, Space, Type};

/// A memory that can be read. The caller has checked the addresses.
trait Memory {
    fn read<const N: usize>(&self, address: u64) -> [u8; N];
}

/// A memory that can also be written. The caller has checked the addresses.
trait WritableMemory: Memory {
    fn write<const N: usize>(&mut self, address: u64, bytes: [u8; N]);
}

/// Global memory, which the emulator allocates in host memory.
struct Host;

impl Memory for Host {
    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        // SAFETY: `Launch::check_global` has found the address in an allocation, which outlives the launch.
        unsafe { (address as *const [u8; N]).read_unaligned() }
    }
}

impl WritableMemory for Host {
    fn write<const N: usize>(&mut self, address: u64, bytes: [u8; N]) {
        // SAFETY: `Launch::check_global` has found the address in an allocation, and no references into allocations
        // exist.
        unsafe { (address as *mut [u8; N]).write_unaligned(bytes) }
    }
}

/// A memory that the emulator owns, such as shared memory or local memory.
impl Memory for [u8] {
    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self[address as usize..][..N]);
        bytes
    }
}

impl WritableMemory for [u8] {
    fn write<const N: usize>(&mut self, address: u64, bytes: [u8; N]) {
        self[address as usize..][..N].copy_from_slice(&bytes);
    }
}

/// Borrows bytes of global memory.
///
/// # Safety
/// The bytes are in one allocation, and no code writes them while they are borrowed.
pub unsafe fn host_bytes<'a>(address: u64, bytes: usize) -> &'a [u8] {
    // For zero bytes the address may be invalid, so no slice may be made from it.
    if bytes == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees that the bytes are in one allocation, and that no code writes them while they are
    // borrowed.
    unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
}

pub fn check_aligned(address: u64, bytes: usize) -> Result<(), Fault> {
    if address.is_multiple_of(bytes as u64) {
        Ok(())
    } else {
        Err(Fault::Misaligned { address, bytes })
    }
}

impl Warp {
    /// Returns the address of the access in each lane.
    pub fn addresses(&self, address: Address) -> DoubleRow {
        let offset = address.offset;
        match address.base {
            None => [offset; LANES],
            Some(Register::Double(row)) => {
                self.doubles[row as usize].map(|base| base.wrapping_add(offset))
            }
            // The addition wraps, because the 32-bit offset in the instruction may be negative.
            Some(Register::Word(row)) => {
                self.words[row as usize].map(|base| u64::from(base.wrapping_add(offset as u32)))
            }
            Some(register) => self.row(register),
        }
    }

    /// Returns each lane's address in the shared memory space. The function converts generic addresses to addresses of
    /// that space.
    pub fn shared_addresses(&self, address: Address) -> DoubleRow {
        self.addresses(address)
            .map(|address| match Space::of_generic(address) {
                (Space::Shared, inside) => inside,
                _ => address,
            })
    }
}

impl Launch<'_> {
    /// Checks that the bytes at an address are in one allocation.
    ///
    /// # Errors
    /// Returns an error if some of the bytes are outside of every allocation, or if the bytes are in more than one
    /// allocation.
    pub fn check_global(&self, address: u64, bytes: usize) -> Result<(), Fault> {
        let next = self
            .allocations
            .partition_point(|allocation| allocation.start <= address);
        let inside = next > 0 && {
            let allocation = self.allocations[next - 1];
            let at = address - allocation.start;
            at <= allocation.bytes && bytes as u64 <= allocation.bytes - at
        };
        if inside {
            Ok(())
        } else {
            Err(Fault::OutOfBounds {
                memory: "allocated global memory",
                address,
                bytes,
            })
        }
    }

    /// Checks the accesses of all lanes.
    fn check_lanes(&self, addresses: &DoubleRow, bytes: usize, mask: u32) -> Result<(), Fault> {
        let of_lanes = || lanes(mask).map(|lane| addresses[lane]);
        let (first, last) = of_lanes().fold((u64::MAX, 0), |(first, last), address| {
            (first.min(address), last.max(address))
        });
        let span = usize::try_from(last - first).unwrap_or(usize::MAX);
        if self.check_global(first, span.saturating_add(bytes)).is_ok() {
            return Ok(());
        }
        of_lanes().try_for_each(|address| self.check_global(address, bytes))
    }
}

/// Calls `run(first_lane, lane_count)` for each range of lanes whose accesses are contiguous in memory.
fn runs(addresses: &DoubleRow, bytes: usize, mask: u32, mut run: impl FnMut(usize, usize)) {
    let mut start = 0;
    while start < LANES {
        if mask >> start & 1 == 0 {
            start += 1;
            continue;
        }
        let mut end = start + 1;
        while end < LANES
            && mask >> end & 1 != 0
            && addresses[end] == addresses[end - 1] + bytes as u64
        {
            end += 1;
        }
        run(start, end - start);
        start = end;
        // A lane that accesses the same address as the previous lane is skipped, because the check of the previous lane
        // covers both.
        while start < LANES && mask >> start & 1 != 0 && addresses[start] == addresses[start - 1] {
            start += 1;
        }
    }
}

impl Cube<'_> {
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        access: &Access,
        mask: u32,
    ) -> Result<(), Fault> {
        self.by_space(warp, access, mask, |cube, warp, space, addresses, mask| {
            let bytes = access.number.bytes() * access.registers.len();
            match space {
                Space::Shared => {
                    runs(addresses, bytes, mask, |lane, count| {
                        let at = addresses[lane] as usize;
                        cube.shared.reading(&warp.clock, at, bytes * count);
                    });
                    load_from(cube.shared.bytes(), warp, access, addresses, mask);
                }
                Space::Local => {
                    let local = std::mem::take(&mut warp.local);
                    load_from(local.as_slice(), warp, access, addresses, mask);
                    warp.local = local;
                }
                Space::Parameter => {
                    load_from(cube.launch.arguments, warp, access, addresses, mask);
                }
                Space::Global | Space::Generic => load_from(&Host, warp, access, addresses, mask),
            }
            Ok(())
        })
    }

    pub(super) fn store(
        &mut self,
        warp: &mut Warp,
        access: &Access,
        mask: u32,
    ) -> Result<(), Fault> {
        self.by_space(warp, access, mask, |cube, warp, space, addresses, mask| {
            cube.events += 1;
            let bytes = access.number.bytes() * access.registers.len();
            match space {
                Space::Shared => {
                    runs(addresses, bytes, mask, |lane, count| {
                        let (at, bytes) = (addresses[lane] as usize, bytes * count);
                        cube.shared.writing(&warp.clock, at, bytes);
                        let (owner, now) = (warp.clock.owner(), warp.clock.now());
                        cube.shared.written(owner, now, at, bytes);
                    });
                    store_to(cube.shared.bytes_mut(), warp, access, addresses, mask);
                }
                Space::Local => {
                    let mut local = std::mem::take(&mut warp.local);
                    store_to(local.as_mut_slice(), warp, access, addresses, mask);
                    warp.local = local;
                }
                Space::Parameter => {
                    return Err(Fault::Unsupported("a store to a kernel's arguments".into()));
                }
                Space::Global | Space::Generic => {
                    store_to(&mut Host, warp, access, addresses, mask);
                }
            }
            Ok(())
        })
    }

    /// Splits the lanes by the memory space of their addresses, and calls `act` for each space. `act` receives checked
    /// addresses relative to the start of the space.
    fn by_space(
        &mut self,
        warp: &mut Warp,
        access: &Access,
        mask: u32,
        mut act: impl FnMut(&mut Self, &mut Warp, Space, &DoubleRow, u32) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let bytes = access.number.bytes() * access.registers.len();
        let mut addresses = warp.addresses(access.address);
        let mut rest = mask;
        while rest != 0 {
            let (space, mask) = in_one_space(&mut addresses, access.space, rest);
            rest &= !mask;
            self.check(space, &mut addresses, bytes, mask)?;
            act(self, warp, space, &addresses, mask)?;
        }
        Ok(())
    }

    /// Checks that the addresses are aligned and inside their memory space. Makes the addresses relative to the start
    /// of that space.
    fn check(
        &self,
        space: Space,
        addresses: &mut DoubleRow,
        bytes: usize,
        mask: u32,
    ) -> Result<(), Fault> {
        let all = lanes(mask).fold(0, |all, lane| all | addresses[lane]);
        if !all.is_multiple_of(bytes as u64) {
            lanes(mask).try_for_each(|lane| check_aligned(addresses[lane], bytes))?;
        }
        match space {
            Space::Shared => {
                for lane in lanes(mask) {
                    addresses[lane] = self.shared.offset(addresses[lane], bytes)? as u64;
                }
            }
            Space::Local => {
                let size = self.launch.function.local_bytes;
                for lane in lanes(mask) {
                    check_inside("local memory", addresses[lane], bytes, size)?;
                    addresses[lane] += (lane * size) as u64;
                }
            }
            Space::Parameter => {
                for lane in lanes(mask) {
                    let size = self.launch.arguments.len();
                    check_inside("the kernel's arguments", addresses[lane], bytes, size)?;
                }
            }
            Space::Global | Space::Generic => self.launch.check_lanes(addresses, bytes, mask)?,
        }
        Ok(())
    }

    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        atomic: &Atomic,
        mask: u32,
    ) -> Result<(), Fault> {
        self.events += 1;
        let bytes = atomic.number.bytes();
        let mut addresses = warp.addresses(atomic.address);
        let mut rest = mask;
        while rest != 0 {
            let (space, mask) = in_one_space(&mut addresses, atomic.space, rest);
            rest &= !mask;
            self.check(space, &mut addresses, bytes, mask)?;
            for lane in lanes(mask) {
                let at = addresses[lane];
                let operands = atomic.operands.map(|operand| warp.get(operand, lane));
                let old = match space {
                    Space::Shared => {
                        self.shared.changing(&warp.clock, at as usize, bytes);
                        change(self.shared.bytes_mut(), atomic, at, operands)
                    }
                    Space::Global => change(&mut Host, atomic, at, operands),
                    _ => None,
                };
                let old = old.ok_or_else(|| {
                    Fault::Unsupported(format!("an atomic of {:?} there", atomic.number))
                })?;
                if let Some(to) = atomic.to {
                    warp.set(to, lane, old);
                }
            }
        }
        Ok(())
    }
}

/// Returns the memory space that the first lane in `mask` accesses, and the mask of all lanes that access the same
/// space. Makes the addresses of these lanes relative to that space.
fn in_one_space(addresses: &mut DoubleRow, named: Space, mask: u32) -> (Space, u32) {
    // The address of a kernel argument is an offset. The offset does not show that it belongs to the parameter space.
    // So the instruction must name the parameter space, unless `cvta` has converted the offset to a generic address.
    if !matches!(named, Space::Generic | Space::Parameter) {
        return (named, mask);
    }
    let space_of = |address| match (named, Space::of_generic(address)) {
        (Space::Parameter, (Space::Global, address)) => (Space::Parameter, address),
        (_, space) => space,
    };
    let (space, _) = space_of(addresses[mask.trailing_zeros() as usize % LANES]);
    let mut same = 0;
    for lane in lanes(mask) {
        let (own, address) = space_of(addresses[lane]);
        if own == space {
            same |= 1 << lane;
            addresses[lane] = address;
        }
    }
    (space, same)
}

fn check_inside(
    memory: &'static str,
    address: u64,
    bytes: usize,
    size: usize,
) -> Result<(), Fault> {
    if address
        .checked_add(bytes as u64)
        .is_some_and(|end| end <= size as u64)
    {
        Ok(())
    } else {
        Err(Fault::OutOfBounds {
            memory,
            address,
            bytes,
        })
    }
}

fn load_from(
    memory: &(impl Memory + ?Sized),
    warp: &mut Warp,
    access: &Access,
    addresses: &DoubleRow,
    mask: u32,
) {
    let number = access.number;
    for (k, register) in access.registers.iter().enumerate() {
        let offset = (k * number.bytes()) as u64;
        match (number.bytes(), *register) {
            (4, Register::Word(row)) => {
                let row = &mut warp.words[row as usize];
                for lane in lanes(mask) {
                    row[lane] = u32::from_le_bytes(memory.read(addresses[lane] + offset));
                }
            }
            (8, Register::Double(row)) => {
                let row = &mut warp.doubles[row as usize];
                for lane in lanes(mask) {
                    row[lane] = u64::from_le_bytes(memory.read(addresses[lane] + offset));
                }
            }
            (_, register) => {
                for lane in lanes(mask) {
                    let value = read(memory, number, addresses[lane] + offset);
                    warp.set(register, lane, value);
                }
            }
        }
    }
}

/// Reads a value of type `number`. A signed value is sign-extended to 64 bits, since the register may be wider than the
/// value.
fn read(memory: &(impl Memory + ?Sized), number: Type, address: u64) -> u64 {
    let value = match number.bytes() {
        1 => u8::from_le_bytes(memory.read(address)).into(),
        2 => u16::from_le_bytes(memory.read(address)).into(),
        4 => u32::from_le_bytes(memory.read(address)).into(),
        _ => u64::from_le_bytes(memory.read(address)),
    };
    if number.is_signed() {
        crate::numbers::extend(number, value) as u64
    } else {
        value
    }
}

fn write(memory: &mut (impl WritableMemory + ?Sized), number: Type, address: u64, value: u64) {
    match number.bytes() {
        1 => memory.write(address, (value as u8).to_le_bytes()),
        2 => memory.write(address, (value as u16).to_le_bytes()),
        4 => memory.write(address, (value as u32).to_le_bytes()),
        _ => memory.write(address, value.to_le_bytes()),
    }
}

fn store_to(
    memory: &mut (impl WritableMemory + ?Sized),
    warp: &Warp,
    access: &Access,
    addresses: &DoubleRow,
    mask: u32,
) {
    for (k, register) in access.registers.iter().enumerate() {
        let offset = (k * access.number.bytes()) as u64;
        for lane in lanes(mask) {
            let value = warp.get(*register, lane);
            write(memory, access.number, addresses[lane] + offset, value);
        }
    }
}

/// Applies an atomic operation to a value in memory, and returns the old value.
fn change(
    memory: &mut (impl WritableMemory + ?Sized),
    atomic: &Atomic,
    address: u64,
    [x, y]: [u64; 2],
) -> Option<u64> {
    let number = atomic.number;
    let old = truncate(number, read(memory, number, address));
    let (x, y) = (truncate(number, x), truncate(number, y));
    let new = match atomic.operation {
        AtomicOperation::Arithmetic(arithmetic) => arithmetic.of([old, x, 0, 0])?,
        AtomicOperation::Exchange => x,
        AtomicOperation::CompareAndSwap if old == x => y,
        AtomicOperation::CompareAndSwap => old,
        AtomicOperation::Increment if old >= x => 0,
        AtomicOperation::Increment => old + 1,
        AtomicOperation::Decrement if old == 0 || old > x => x,
        AtomicOperation::Decrement => old - 1,
    };
    write(memory, number, address, new);
    Some(old)
}
