//! What is made of the arguments' definition: the help, the man pages, the completions.

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

use super::help::{POINTERS, STORES};
use super::{Args, print};
use crate::exit::{Exit, Stop, TABLE};

/// The definition, with the last lines of each command's long help.
pub(crate) fn command() -> Command {
    Args::command().mut_subcommands(|sub| {
        let text = details(&sub).map_or_else(String::new, |text| format!("{text}\n\n"));
        sub.after_long_help(format!("{text}{POINTERS}"))
    })
}

/// The text behind the options of a command.
fn details(command: &Command) -> Option<String> {
    command.get_after_long_help().map(ToString::to_string)
}

/// A command of this name.
fn find<'a>(whole: &'a mut Command, name: &str) -> Result<&'a mut Command, Stop> {
    // It may be an address, with its password, so it is not repeated.
    let unknown = || Stop::usage("there is no such command or topic: see leasehold --help");
    whole.find_subcommand_mut(name).ok_or_else(unknown)
}

pub(crate) fn help(topic: Option<&str>) -> Result<Exit, Stop> {
    let mut whole = command();
    whole.build();
    let text = match topic {
        Some("stores") => format!("{STORES}\n"),
        Some("exit-codes") => format!("{TABLE}\n"),
        Some(name) => find(&mut whole, name)?.render_long_help().to_string(),
        None => whole.render_long_help().to_string(),
    };
    print(text.as_bytes())
}

pub(crate) fn completions(shell: Shell) -> Result<Exit, Stop> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(), "leasehold", &mut text);
    print(&text)
}

pub(crate) fn man(name: Option<&str>) -> Result<Exit, Stop> {
    let mut whole = Args::command();
    whole.build();
    let page = match name {
        None => whole,
        Some(name) => find(&mut whole, name)?.clone().display_name(format!("leasehold-{name}")),
    };
    let text = render(page).map_err(|error| Stop::failure(format!("the page could not be made: {error}")))?;
    print(&text)
}

fn render(page: Command) -> std::io::Result<Vec<u8>> {
    let is_whole = page.has_subcommands();
    let details = details(&page);
    let man = Man::new(page);
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if is_whole {
        man.render_subcommands_section(&mut text)?;
    }
    // The library joins the lines of these texts, also those of tables.
    if let Some(details) = details {
        text.extend(section("DETAILS", &details).into_bytes());
    }
    if is_whole {
        man.render_version_section(&mut text)?;
    } else {
        text.extend(section("EXIT STATUS", TABLE).into_bytes());
        text.extend(section("SEE ALSO", "leasehold(1)").into_bytes());
    }
    Ok(text)
}

/// A section of a man page. Lines that are indented are a table or an example, and stay as they are. They begin at the left edge, so
/// that they fit into a terminal of 80 columns.
fn section(title: &str, text: &str) -> String {
    let mut page = format!(".SH \"{title}\"\n");
    let mut is_table = false;
    for line in text.lines() {
        let is_indented = line.starts_with(' ');
        if is_indented != is_table {
            page.push_str(if is_indented { ".nf\n.in 0\n" } else { ".in\n.fi\n" });
            is_table = is_indented;
        }
        if line.is_empty() {
            page.push_str(".PP\n");
            continue;
        }
        // A dot or an apostrophe at its beginning would be a command.
        if line.starts_with(['.', '\'']) {
            page.push_str("\\&");
        }
        page.push_str(&line.replace('\\', "\\e").replace('-', "\\-"));
        page.push('\n');
    }
    if is_table {
        page.push_str(".in\n.fi\n");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_a_man_page_keep_their_lines() {
        let page = section("X", "A -b\n.c\n\n  d   e\\f\n  g\nh\n  i");
        let expected = [
            ".SH \"X\"",
            "A \\-b",
            "\\&.c",
            ".PP",
            ".nf",
            ".in 0",
            "  d   e\\ef",
            "  g",
            ".in",
            ".fi",
            "h",
            ".nf",
            ".in 0",
            "  i",
            ".in",
            ".fi",
            "",
        ];
        assert_eq!(page, expected.join("\n"));
    }

    #[test]
    fn no_line_of_the_help_is_wider_than_a_terminal() {
        let mut whole = command();
        let texts: Vec<String> = whole.get_subcommands().filter_map(details).collect();
        let overview = details(&whole).unwrap();
        for text in texts.iter().chain([&overview, &STORES.to_owned(), &TABLE.to_owned()]) {
            for line in text.lines() {
                assert!(line.chars().count() <= 81, "{line}");
            }
        }
        whole.build();
        for sub in whole.get_subcommands() {
            let long = details(sub).unwrap_or_default();
            assert!(sub.is_hide_set() || long.ends_with(POINTERS), "{}", sub.get_name());
            assert!(
                !long.contains("128+N") && !long.contains("rediss://"),
                "{} repeats a table",
                sub.get_name()
            );
        }
    }
}
