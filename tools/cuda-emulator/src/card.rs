//! The emulated GPUs, with the properties that a program can query through CUDA's driver.

use std::sync::OnceLock;

/// The properties of an emulated GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// The value of the environment variable `EMULATED_CARD` that selects this GPU.
    pub name: &'static str,
    /// The compute capability, as major and minor version.
    pub capability: (i32, i32),
    /// The maximum shared memory per thread block, in bytes.
    pub shared_memory: i32,
    /// The shared memory per multiprocessor, in bytes.
    pub multiprocessor_memory: i32,
    pub multiprocessor_threads: i32,
}

/// The emulated GPUs. The first GPU in the list is the default.
pub const CARDS: [Card; 5] = [
    Card {
        name: "a100",
        capability: (8, 0),
        shared_memory: 163 << 10,
        multiprocessor_memory: 164 << 10,
        multiprocessor_threads: 2048,
    },
    Card {
        name: "rtx3090",
        capability: (8, 6),
        shared_memory: 99 << 10,
        multiprocessor_memory: 100 << 10,
        multiprocessor_threads: 1536,
    },
    Card {
        name: "rtx4090",
        capability: (8, 9),
        shared_memory: 99 << 10,
        multiprocessor_memory: 100 << 10,
        multiprocessor_threads: 1536,
    },
    Card {
        name: "h100",
        capability: (9, 0),
        shared_memory: 227 << 10,
        multiprocessor_memory: 228 << 10,
        multiprocessor_threads: 2048,
    },
    Card {
        name: "rtx5090",
        capability: (12, 0),
        shared_memory: 99 << 10,
        multiprocessor_memory: 100 << 10,
        multiprocessor_threads: 1536,
    },
];

/// The default number of multiprocessors. The number is small, so that even a program with little work uses all
/// multiprocessors.
const MULTIPROCESSORS: i32 = 4;

/// The default size of global memory, in bytes.
const MEMORY: usize = 8 << 30;

/// The emulator's settings, read from environment variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub card: Card,
    pub multiprocessors: i32,
    pub memory: usize,
    /// The number of host threads that run the thread blocks of a launch.
    pub threads: usize,
    /// True if a data race makes the launch fail. False if the emulator only reports the race.
    pub races_fail: bool,
    /// Launches that take at least this time, in milliseconds, are reported as slow. `None` if the emulator never
    /// reports slow launches.
    pub slow_launch: Option<u64>,
}

impl Settings {
    /// Returns the settings of this process.
    pub fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            Self::read(|name| std::env::var(name).ok()).unwrap_or_else(|wrong| {
                eprintln!("emulator: {wrong}");
                std::process::exit(2)
            })
        })
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let card = match variable("EMULATED_CARD") {
            None => CARDS[0],
            Some(name) => *CARDS.iter().find(|card| card.name == name).ok_or_else(|| {
                let names: Vec<_> = CARDS.iter().map(|card| card.name).collect();
                format!("EMULATED_CARD={name}: expected one of {}", names.join(", "))
            })?,
        };
        let number = |name: &str| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(format!("{name}={text} is not a number")),
            },
        };
        let races_fail = match variable("EMULATOR_RACES").as_deref() {
            None | Some("fail") => true,
            Some("tell") => false,
            Some(wrong) => return Err(format!("EMULATOR_RACES={wrong}: use `fail` or `tell`")),
        };
        let at_hand = || std::thread::available_parallelism().map_or(1, |threads| threads.get());
        Ok(Self {
            card,
            multiprocessors: number("EMULATED_MULTIPROCESSORS")?
                .map_or(MULTIPROCESSORS, |count| count as i32),
            memory: number("EMULATED_MEMORY")?.map_or(MEMORY, |bytes| bytes as usize),
            threads: number("EMULATOR_THREADS")?.map_or_else(at_hand, |threads| threads as usize),
            races_fail,
            slow_launch: number("EMULATOR_SLOW_LAUNCH")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_follow_the_environment() {
        let read = |pairs: &[(&str, &str)]| {
            Settings::read(|name| {
                let found = pairs.iter().find(|(key, _)| *key == name)?;
                Some(found.1.to_string())
            })
        };
        assert_eq!(read(&[]).unwrap().card.name, "a100");
        let settings = read(&[
            ("EMULATED_CARD", "h100"),
            ("EMULATED_MULTIPROCESSORS", "132"),
        ]);
        let settings = settings.unwrap();
        assert_eq!(settings.card.capability, (9, 0));
        assert_eq!(settings.multiprocessors, 132);
        assert!(read(&[("EMULATED_CARD", "voodoo")]).is_err());
        assert!(!read(&[("EMULATOR_RACES", "tell")]).unwrap().races_fail);
        assert!(read(&[("EMULATOR_RACES", "no")]).is_err());
        assert!(read(&[("EMULATED_MEMORY", "much")]).is_err());
    }
}
