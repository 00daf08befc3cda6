//! The cards that are emulated: what a program can ask about them.

use std::sync::OnceLock;

/// What a card says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// As `EMULATED_CARD` names it.
    pub name: &'static str,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Bytes of shared memory that a cube can ask for.
    pub shared_memory: i32,
    /// And those of a multiprocessor.
    pub multiprocessor_memory: i32,
    pub multiprocessor_threads: i32,
}

/// The first one is emulated where nobody says which.
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

/// Multiprocessors where nobody says how many: few, so that what is divided among them is seldom divided to nothing.
const MULTIPROCESSORS: i32 = 4;

/// Bytes of global memory where nobody says how many.
const MEMORY: usize = 8 << 30;

/// What the environment asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub card: Card,
    pub multiprocessors: i32,
    pub memory: usize,
    /// Threads that run a launch's cubes.
    pub threads: usize,
    /// Whether a launch with a race fails, or is only told of.
    pub races_fail: bool,
    /// Launches that take longer are told of, in milliseconds.
    pub slow_launch: Option<u64>,
}

impl Settings {
    /// Those of this process.
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
                format!("EMULATED_CARD={name}: it is one of {}", names.join(", "))
            })?,
        };
        let number = |name: &str| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(format!("{name}={text} is no number")),
            },
        };
        let races_fail = match variable("EMULATOR_RACES").as_deref() {
            None | Some("fail") => true,
            Some("tell") => false,
            Some(wrong) => return Err(format!("EMULATOR_RACES={wrong}: it is `fail` or `tell`")),
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
    fn the_environment_chooses() {
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
