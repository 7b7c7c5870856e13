//! What the launcher tells the plugin besides what the user has asked for, as variables.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// When the launcher was started, in nanoseconds since 1970: what is younger belongs to this session, of which a router's
/// children are parts.
pub const SESSION_BEGAN: &str = "MOE_HOT_SESSION_BEGAN";
/// Set where the user has been told that the profile is of another quantisation.
pub const SAID_QUANTISATION: &str = "MOE_HOT_SAID_QUANTISATION";

/// The model's file as the user calls it, absolute: profiles are kept beside it.
pub const MODEL_FILE: &str = "MOE_HOT_MODEL_FILE";

/// What the launcher sets.
pub fn facts(said_quantisation: bool, model_file: Option<PathBuf>) -> Vec<(&'static str, OsString)> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let said = said_quantisation.then(|| (SAID_QUANTISATION, OsString::from("1")));
    let file = model_file.map(|file| (MODEL_FILE, file.into_os_string()));
    [(SESSION_BEGAN, now.as_nanos().to_string().into())].into_iter().chain(said).chain(file).collect()
}

/// The time that [`SESSION_BEGAN`] says.
pub fn session_began(value: &OsStr) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_nanos(value.to_str()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_session_is_read_as_it_is_written() {
        let before = SystemTime::now();
        let facts = facts(false, None);
        let [(SESSION_BEGAN, value)] = facts.as_slice() else { panic!("{facts:?}") };
        let read = session_began(value).unwrap();
        assert!((before..=SystemTime::now()).contains(&read));
        assert_eq!(session_began(OsStr::new("yesterday")), None);
    }
}
