//! `--moe-hot-cache auto`: where a model's own profile is kept, and what is there already.
//!
//! Beside the model, `MODEL.gguf.experts.json`; where that cannot be written, or is another model's, in the user's cache
//! directory.

use super::name::first_part;
use crate::files::{beside, check};
use crate::profile::RecordedProfile;
use etcetera::BaseStrategy;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// What a profile's name has behind the model's.
const ENDING: &str = ".experts.json";
/// Our folder in the user's cache directory.
const FOLDER: &str = "moe-hot";
/// Digits of a fingerprint in a name there.
const TAG_DIGITS: usize = 8;

/// What [`find`] has found.
#[derive(Debug, Default, PartialEq)]
pub struct Kept {
    /// Where what is learnt goes; `None`: nowhere.
    pub path: Option<PathBuf>,
    /// What an earlier session has learnt, and whether that was with another quantisation.
    pub profile: Option<(RecordedProfile, bool)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Where the profile of a model may be, the best place first. `file`: the model's, where it is known. `tag`: 16 hex digits that
/// tell the model from others.
pub fn places(file: Option<&Path>, tag: &str) -> Vec<PathBuf> {
    let tag = tag.get(..TAG_DIGITS).unwrap_or(tag);
    let named = |file: &Path| {
        let mut name = file.file_name().unwrap_or(OsStr::new("model")).to_owned();
        name.push(ENDING);
        name
    };
    let first = file.map(first_part);
    let beside_model = first.as_ref().map(|file| file.with_file_name(named(file)));
    let cache = etcetera::choose_base_strategy().ok().map(|strategy| strategy.cache_dir().join(FOLDER));
    let cached = cache.map(|folder| beside(&folder.join(named(first.as_deref().unwrap_or(Path::new("model")))), tag));
    beside_model.into_iter().chain(cached).collect()
}

/// Looks for a model's profile in these places. `is_other_quantisation`: fails with why a profile is not this model's.
/// `learns`: whether it is to be written there.
pub fn find<E: std::fmt::Display>(
    places: &[PathBuf],
    learns: bool,
    is_other_quantisation: impl Fn(&RecordedProfile) -> Result<bool, E>,
) -> Kept {
    let mut kept = Kept::default();
    let mut refusals = Vec::new();
    for path in places {
        let mut refuse = |why: &dyn std::fmt::Display| refusals.push(format!("{}: {why}", path.display()));
        let is_free = fs::metadata(path).map_or(true, |meta| meta.is_file() && meta.len() == 0);
        if !is_free {
            let read = RecordedProfile::read(path).map_err(|error| error.to_string());
            let fitting = read.and_then(|profile| match is_other_quantisation(&profile) {
                Ok(is_other) => Ok((profile, is_other)),
                Err(why) => Err(format!("{}: {why}", path.display())),
            });
            match fitting {
                Ok(fitting) => {
                    let is_named = fitting.0.model.is_some();
                    // Here after a read-only one beside the model: this one began with that.
                    kept.profile = Some(fitting);
                    if learns && !is_named {
                        // Another program's, or one that was made: nobody knows later whose is what we would add.
                        refuse(&"names no model, is begun with and left as it is");
                        continue;
                    }
                }
                Err(why) => {
                    refusals.push(why);
                    continue;
                }
            }
        }
        if !learns {
            if kept.profile.is_some() {
                break;
            }
            continue;
        }
        // Our folder need not be there yet; the place beside the model is.
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        match made.map_err(|error| error.to_string()).and_then(|()| check(path).map_err(|error| error.to_string())) {
            Ok(()) => {
                kept.path = Some(path.clone());
                break;
            }
            Err(why) => refuse(&why),
        }
    }
    kept.notes = match &kept.path {
        Some(path) => refusals.iter().map(|why| format!("{why}; this profile is kept in {}", path.display())).collect(),
        None if learns => refusals.iter().map(|why| format!("what is learnt is not kept: {why}")).collect(),
        None => refusals,
    };
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[0,1]]}]}"#;

    fn find_any(places: &[PathBuf], learns: bool) -> Kept {
        find(places, learns, |_| Ok::<_, String>(false))
    }

    #[test]
    fn a_profile_lies_beside_the_first_part_of_a_model_or_in_the_users_cache() {
        let of = |file: Option<&str>| places(file.map(Path::new), "0123456789abcdef");
        let cached = of(None);
        assert_eq!(cached.len(), 1);
        assert!(cached[0].ends_with("moe-hot/model.experts-01234567.json"), "{cached:?}");
        let [beside, cached] = of(Some("/m/a.gguf")).try_into().unwrap();
        assert_eq!(beside, Path::new("/m/a.gguf.experts.json"));
        assert!(cached.ends_with("moe-hot/a.gguf.experts-01234567.json"));
        assert_eq!(of(Some("/m/a-00002-of-00003.gguf"))[0], Path::new("/m/a-00001-of-00003.gguf.experts.json"));
    }

    #[test]
    fn the_first_place_that_will_do_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let places = [at("beside"), at("cache/moe-hot/kept")];
        assert_eq!(find_any(&places, true), Kept { path: Some(at("beside")), ..Kept::default() });
        fs::write(at("beside"), "").unwrap();
        assert_eq!(find_any(&places, true).path, Some(at("beside")), "an empty file is free");
        fs::write(at("beside"), PROFILE.replace("}]}", r#"}],"model":{"fingerprint":"f","tensors":{"a":"1"}}}"#))
            .unwrap();
        let warm = find_any(&places, true);
        assert_eq!((warm.path, warm.profile.unwrap().1, warm.notes), (Some(at("beside")), false, Vec::new()));
        assert!(!at("cache").exists());
    }

    #[test]
    fn what_is_no_profile_of_this_model_stays_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let places = [at("beside"), at("cache/moe-hot/kept")];
        let one_note = |kept: Kept, said: &str| {
            assert_eq!(kept.path, Some(at("cache/moe-hot/kept")));
            assert!(kept.notes.len() == 1 && kept.notes[0].contains(said), "{:?}", kept.notes);
            assert!(kept.profile.is_none());
        };
        fs::write(at("beside"), "GGUF").unwrap();
        one_note(find_any(&places, true), "is not JSON");
        fs::write(at("beside"), PROFILE).unwrap();
        one_note(find(&places, true, |_| Err("other")), "beside: other");
        let unnamed = find_any(&places, true);
        assert_eq!(unnamed.path, Some(at("cache/moe-hot/kept")));
        assert!(unnamed.notes[0].contains("names no model") && unnamed.profile.is_some());
        assert_eq!(find_any(&places, false).notes, [""; 0], "nothing would be added");
        fs::remove_file(at("beside")).unwrap();
        fs::create_dir(at("beside")).unwrap();
        one_note(find_any(&places, true), "is a folder");
    }

    #[test]
    fn where_nothing_can_be_written_the_next_place_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("real"), PROFILE).unwrap();
        // Nobody may write there, root neither.
        let places = [PathBuf::from("/proc/moe-hot.experts.json"), at("cache/kept")];
        let cold = find_any(&places, true);
        assert_eq!((cold.path, cold.profile), (Some(at("cache/kept")), None));
        assert!(
            cold.notes[0].starts_with("/proc/moe-hot.experts.json: expected an existing folder"),
            "{:?}",
            cold.notes
        );
        let nowhere = find_any(&places[..1], true);
        assert_eq!(nowhere.path, None);
        assert!(nowhere.notes[0].starts_with("what is learnt is not kept: /proc/"));
        assert_eq!(find_any(&[at("real")], false).profile.unwrap().0.layers.len(), 1, "a fixed set needs no place");
    }
}
