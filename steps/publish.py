"""Uploads an exported model to the Hugging Face hub, in one commit.

    python -m steps.publish --folder exported --repo owner/name --message "Checkpoint 7 of demo"

HF_TOKEN must be allowed to write. A repository that is not there yet is made, and is private: to publish it is the
owner's decision. No artifact comes of it; the same command again uploads what is not there.
"""

import argparse
import sys
from pathlib import Path
from typing import Never

from steps.common.errors import InvalidInputs, NightschoolError
from steps.common.step import exit_status_of


def publish(folder: Path, repo: str, message: str) -> str:
    """Uploads the files of `folder`; returns the commit's address.

    Raises `InvalidInputs` without a token, and `NightschoolError` where the hub does not take it.
    """
    # In the train environment only.
    from huggingface_hub import HfApi, get_token  # type: ignore[import-not-found, unused-ignore]
    from huggingface_hub.errors import (  # type: ignore[import-not-found, unused-ignore]
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    if get_token() is None:
        raise InvalidInputs("there is no HF_TOKEN: set it to a token of the hub that may write")
    api = HfApi(library_name="nightschool")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url)
    except (HTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        first = str(error).strip().split("\n")[0]
        raise NightschoolError(
            f"the hub did not take {repo} ({first}); it is in {folder}: the same command uploads it again"
        ) from None


def main(arguments: list[str] | None = None) -> Never:
    """Runs as a command."""
    parser = argparse.ArgumentParser(prog="python -m steps.publish", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="what `nightschool export` wrote")
    parser.add_argument("--repo", required=True, help="OWNER/NAME on the hub")
    parser.add_argument("--message", required=True, help="of the commit")
    given = parser.parse_args(arguments)
    sys.exit(exit_status_of(lambda: print(publish(given.folder, given.repo, given.message))))


if __name__ == "__main__":
    main()
