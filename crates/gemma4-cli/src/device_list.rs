//! The argument `--device` of commands that run a model: one device, or several devices of one backend.

use crate::Error;
use crate::device::{Chosen, DeviceName, choose, choose_numbered};
use crate::terminal::WrongArgument;
use clap::ValueEnum;
use clap::builder::{PossibleValue, TypedValueParser};
use std::ffi::OsStr;
use std::fmt;
use std::str::FromStr;

/// The devices that `--device` names: one device with or without a number, or several devices of one backend with
/// distinct numbers.
///
/// ```
/// use gemma4_cli::device_list::DeviceList;
///
/// assert!("cuda".parse::<DeviceList>().is_ok());
/// assert!("cuda:0,cuda:1".parse::<DeviceList>().is_ok());
/// assert!("cuda,cuda".parse::<DeviceList>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceList {
    name: DeviceName,
    /// The numbers of the devices. Empty for the best device of the backend.
    numbers: Vec<usize>,
}

impl DeviceList {
    /// Opens the only device.
    ///
    /// # Errors
    /// Returns an error if there are several devices, or if the device does not exist.
    pub fn choose_one(&self) -> Result<Chosen, Error> {
        match self.numbers.as_slice() {
            [] => choose(self.name),
            [number] => choose_numbered(self.name, Some(*number)),
            _ => Err(WrongArgument(format!(
                "--device: {self} are several devices; only `gemma4 serve` runs on several"
            ))
            .into()),
        }
    }

    /// Opens all devices, which are at least one.
    ///
    /// # Errors
    /// Returns an error if a device does not exist.
    pub fn choose_all(&self) -> Result<Vec<Chosen>, Error> {
        let Some((first, others)) = self.numbers.split_first() else {
            return Ok(vec![choose(self.name)?]);
        };
        let first = choose_numbered(self.name, Some(*first))?;
        // All devices have the backend of the first one, which a search for a GPU has found.
        let backend = first.name;
        let others = others.iter();
        let others = others.map(|number| choose_numbered(backend, Some(*number)));
        std::iter::once(Ok(first)).chain(others).collect()
    }
}

impl Chosen {
    /// Returns the device as the user names it: its backend, and its number if one was given, as in `cuda:1`.
    pub fn label(&self) -> String {
        match self.number {
            Some(number) => format!("{}:{number}", self.name.as_str()),
            None => self.name.as_str().to_owned(),
        }
    }
}

impl From<DeviceName> for DeviceList {
    fn from(name: DeviceName) -> Self {
        Self {
            name,
            numbers: Vec::new(),
        }
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_str();
        let numbers = self.numbers.iter();
        let devices: Vec<String> = numbers.map(|number| format!("{name}:{number}")).collect();
        match devices.is_empty() {
            true => f.write_str(name),
            false => f.write_str(&devices.join(",")),
        }
    }
}

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let devices = text.split(',').map(device);
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let (name, _) = devices[0];
        let numbers: Vec<usize> = devices.iter().filter_map(|(_, number)| *number).collect();
        if devices.iter().any(|(other, _)| *other != name) {
            return Err("names several backends; expected devices of one backend".into());
        }
        if devices.len() > 1 && numbers.len() < devices.len() {
            let name = name.as_str();
            return Err(format!(
                "names several devices without numbers; expected {name}:0,{name}:1"
            ));
        }
        let is_twice = |index: usize| numbers[..index].contains(&numbers[index]);
        if let Some(index) = (0..numbers.len()).find(|index| is_twice(*index)) {
            return Err(format!("names the device {} twice", numbers[index]));
        }
        if name == DeviceName::Auto && !numbers.is_empty() {
            return Err("auto takes no number; expected gpu or the name of a backend".into());
        }
        Ok(Self { name, numbers })
    }
}

/// Parses the name of a device, with or without a number.
fn device(text: &str) -> Result<(DeviceName, Option<usize>), String> {
    let (name, number) = match text.split_once(':') {
        Some((name, number)) => (name, Some(number)),
        None => (text, None),
    };
    let known = || {
        let names = DeviceName::value_variants().iter();
        names
            .map(|name| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let name = DeviceName::from_str(name, false)
        .map_err(|_| format!("{name:?} is not a device; expected one of {}", known()))?;
    let number = number.map(|number| {
        let parsed = number.parse::<usize>();
        parsed.map_err(|_| format!("{number:?} is not the number of a device; expected 0, 1, …"))
    });
    Ok((name, number.transpose()?))
}

/// Parses a [`DeviceList`], and lists the names of devices in the help text.
#[derive(Clone, Copy, Debug)]
pub struct DeviceListParser;

impl TypedValueParser for DeviceListParser {
    type Value = DeviceList;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<DeviceList, clap::Error> {
        let parse = |text: &str| text.parse::<DeviceList>();
        TypedValueParser::parse_ref(&parse, command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let names = DeviceName::value_variants().iter();
        Some(Box::new(names.filter_map(ValueEnum::to_possible_value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_list_parses_what_it_displays() {
        for text in ["auto", "cuda", "gpu:1", "cuda:0,cuda:1", "flex:3,flex:0"] {
            let list: DeviceList = text.parse().expect(text);
            assert_eq!(list.to_string(), text);
        }
        assert_eq!("cpu:1".parse(), "flex:1".parse::<DeviceList>());
    }

    #[test]
    fn device_list_refuses_unknown_and_ambiguous_devices() {
        for (text, part) in [
            ("", "is not a device"),
            ("cud", "expected one of auto, gpu, cuda"),
            ("cuda:", "not the number"),
            ("cuda:-1", "not the number"),
            ("cuda:x", "not the number"),
            ("cuda:0,", "is not a device"),
            ("cuda:0,vulkan:1", "several backends"),
            ("cuda,cuda", "without numbers"),
            ("cuda:0,cuda", "without numbers"),
            ("cuda:1,cuda:0,cuda:1", "names the device 1 twice"),
            ("auto:0", "auto takes no number"),
        ] {
            let error = text.parse::<DeviceList>().expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn several_devices_are_refused_where_one_is_needed() {
        let list: DeviceList = "flex:0,flex:1".parse().expect("a list");
        let error = list.choose_one().err().expect("a refusal");
        assert!(error.to_string().contains("flex:0,flex:1"), "{error}");
        let labels: Vec<String> = list
            .choose_all()
            .expect("the CPU exists")
            .iter()
            .map(Chosen::label)
            .collect();
        assert_eq!(labels, ["flex:0", "flex:1"]);
    }
}
