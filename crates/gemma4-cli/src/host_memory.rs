//! The memory of the host.

use std::fs;

/// Returns the total and the available memory in bytes, on Linux.
pub(crate) fn host_memory() -> Option<[usize; 2]> {
    memory_of(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Reads the total and the available memory in bytes from the contents of `/proc/meminfo`.
fn memory_of(text: &str) -> Option<[usize; 2]> {
    let field = |name: &str| -> Option<usize> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kibibytes = line.trim().strip_suffix("kB")?.trim();
        Some(kibibytes.parse::<usize>().ok()? << 10)
    };
    Some([field("MemTotal:")?, field("MemAvailable:")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_meminfo_is_in_bytes() {
        let text =
            "MemTotal:       24617156 kB\nMemFree:         1 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(memory_of(text), Some([24_617_156 << 10, 20_000_000 << 10]));
        assert_eq!(memory_of("MemTotal: 1 kB"), None);
    }
}
