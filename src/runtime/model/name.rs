//! What lines call a model: its file. ggml names no model, but says where its weights lie, and the system whose map that is.

use crate::ggml::{Level, log};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What the system tells of this process's memory.
const MAPS: &str = "/proc/self/maps";
/// Between a range and its file there are permissions, offset, device and inode.
const FIELDS_BEFORE_FILE: usize = 4;

/// Whether this process has had more than one model with us. Then lines say which one they are about.
static ARE_SEVERAL: AtomicBool = AtomicBool::new(false);

/// From now on lines say which model they are about.
pub fn are_several() {
    ARE_SEVERAL.store(true, Relaxed);
}

/// A model's name, once it is known.
#[derive(Default)]
pub struct ModelName(OnceLock<String>);

impl ModelName {
    /// The first word counts.
    pub fn set(&self, name: String) {
        let _ = self.0.set(name);
    }

    /// The name.
    pub fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Logs a line about the model.
    pub fn log(&self, level: Level, line: &str) {
        match self.get().filter(|_| ARE_SEVERAL.load(Relaxed)) {
            Some(name) => log(level, &format!("{name}: {line}")),
            None => log(level, line),
        }
    }
}

/// The file that the memory at `address` is a map of.
pub fn mapped_file(address: usize) -> Option<PathBuf> {
    file_at(&fs::read_to_string(MAPS).ok()?, address)
}

fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (range, mut rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let bound = |text: &str| usize::from_str_radix(text, 16).ok();
        if !(bound(start)?..bound(end)?).contains(&address) {
            return None;
        }
        for _ in 0..FIELDS_BEFORE_FILE {
            rest = rest.trim_start().split_once(' ')?.1;
        }
        Some(PathBuf::from(rest.trim_start())).filter(|path| path.is_absolute())
    })
}

/// What a model in these files is called: `big-00002-of-00003.gguf` is a part of `big`.
pub fn name_of(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    part_of(&name).map_or(name.as_ref(), |(base, _)| base).to_owned()
}

/// The first of the files that a model is in, which is called so: `big-00001-of-00003.gguf`.
pub fn first_part(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    match part_of(&name) {
        Some((base, count)) => file.with_file_name(format!("{base}-00001-of-{count}.gguf")),
        None => file.to_owned(),
    }
}

/// The model's name and the number of parts in the name of a part.
fn part_of(name: &str) -> Option<(&str, &str)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(count) && is_number(number)).then_some((base, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_map_is_found() {
        let maps = "7f00-7f10 r--p 00000000 fe:00 1   /models/a model.gguf\n7f10-7f20 rw-p 00000000 00:00 0 \n\
                    7f20-7f30 rw-p 00000000 00:00 0   [heap]\n";
        assert_eq!(file_at(maps, 0x7f05).unwrap(), Path::new("/models/a model.gguf"));
        assert_eq!([0x7eff, 0x7f10, 0x7f25, 0x8000].map(|address| file_at(maps, address)), [const { None }; 4]);
    }

    #[test]
    fn parts_of_a_model_have_its_name() {
        for (file, name) in [
            ("/m/big-00002-of-00003.gguf", "big"),
            ("/m/small-Q4.gguf", "small-Q4.gguf"),
            ("one-of-us.gguf", "one-of-us.gguf"),
            ("/", ""),
        ] {
            assert_eq!(name_of(Path::new(file)), name);
        }
    }
}
