"""Other forms of a text to draft from: views, and skeletons of tool calls."""
